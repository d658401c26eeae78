"""Metal text in C++ compilers: the rewriter, the shim of `metal_stdlib`, and the CUDA route."""
