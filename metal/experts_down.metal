#include "experts.h"
#include "streams.h"

// Experts, second launch: out[n] = sum_k w2[ids[n, k]] h[n, k], k upwards, and
// last what the shared expert gives, if one does.
//
// Grid (D / T threadgroups of K * SPLIT simdgroups, N): a threadgroup owns
// T channels of a row. A simdgroup has a place k and every SPLIT-th block of
// 1024 columns, 32 a lane. Sums run over a lane's columns upwards, then over
// lanes 16, 8, 4, 2 and 1 apart, then over blocks upwards: the order depends on
// F and K alone. All float. experts_down_back writes out back into the streams
// (streams.h).
template <int D, int F, int K, int SPLIT, int T, typename W, typename I>
METAL_FUNC void experts_down_sums(
    W w,                        // w2 [E, D, F]
    const device float* h,      // [K, F], of a row
    I ids,                      // [K]
    threadgroup float4* stage,  // [simdgroups, 128]
    threadgroup float* sums,    // [K, blocks, T]
    uint tile,
    uint simdgroup,
    uint lane) {
  constexpr int BLOCKS = blocks(F);
  constexpr int R = held<W>(T < 32 ? 2 : T / 8);
  uint place = simdgroup % K;
  uint i = (ids[place] * D + tile * T) * F;
  h += place * F;
  stage += 128 * simdgroup;
  sums += place * BLOCKS * T;
#pragma unroll 1
  for (uint block = simdgroup / K; block < BLOCKS; block += SPLIT) {
    sweep<T / (2 * R), R, F, 2 * F>(
        w, w, i, i + R * F, h, block, stage, sums + T * block, lane);
  }
}

// Adds the places' sums of each channel, behind a barrier.
template <int F, int K, int T, bool SHARED, typename S, typename O>
METAL_FUNC void experts_down_totals(
    const threadgroup float* sums,
    S shared,  // [T]
    O out,     // [T]
    uint thread_index,
    uint threads) {
  constexpr int BLOCKS = blocks(F);
  for (uint t = thread_index; t < T; t += threads) {
    float total = 0;
    for (int k = 0; k < K; k++) {
      float sum = sums[k * BLOCKS * T + t];
      for (int b = 1; b < BLOCKS; b++) {
        sum += sums[(k * BLOCKS + b) * T + t];
      }
      total = k ? total + sum : sum;
    }
    out[t] = SHARED ? total + shared[t] : total;
  }
}

template <
    int D,
    int F,
    int K,
    int SPLIT,
    int T,
    bool SHARED,
    typename W,
    typename I,
    typename S>
METAL_FUNC void experts_down(
    W w,
    const device float* h,
    I ids,
    S shared,           // [D] of a row, what the shared expert gives
    device float* out,  // [D]
    threadgroup float4* stage,
    threadgroup float* sums,
    uint tile,
    uint simdgroup,
    uint lane) {
  experts_down_sums<D, F, K, SPLIT, T>(
      w, h, ids, stage, sums, tile, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint thread_index = 32 * simdgroup + lane;
  experts_down_totals<F, K, T, SHARED>(
      sums, shared + tile * T, out + tile * T, thread_index, 32 * K * SPLIT);
}

template <
    int D,
    int F,
    int K,
    int SPLIT,
    int T,
    bool SHARED,
    int HC,
    int C,
    typename W,
    typename I,
    typename S,
    typename P,
    typename Q,
    typename N>
METAL_FUNC void experts_down_back(
    W w,
    const device float* h,
    I ids,
    S shared,
    const device float* x,  // [HC, D], of a row
    P post,                 // [HC]
    Q comb,                 // [HC, HC]
    const device N* fn,     // [M, HC * D]
    device float* streams,  // [HC, D]
    device float* part,     // [ceil(D / C), M + 1]
    threadgroup float4* stage,
    threadgroup float* sums,
    uint tile,
    uint simdgroup,
    uint lane) {
  stream_tile<HC, C, T, 1, K * SPLIT, N> ahead;
  experts_down_sums<D, F, K, SPLIT, T>(
      w, h, ids, stage, sums, tile, simdgroup, lane);
  begin_streams(ahead, x, post, comb, fn, 1, D, tile * T, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Its sums done, a threadgroup has that memory free.
  threadgroup float* y = (threadgroup float*)stage;  // [T]
  threadgroup float* chunk = y + T;                  // [HC, T]
  uint thread_index = 32 * simdgroup + lane;
  experts_down_totals<F, K, T, SHARED>(
      sums, shared + tile * T, y, thread_index, 32 * K * SPLIT);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_streams(
      ahead, y, chunk, streams, part, 1, D, tile * T, simdgroup, lane);
}
