"""Does it fit: what a run needs, against injected devices and against what loading takes (ME)."""

import contextlib
import gc
import inspect
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx import download, loading, preflight, wired
from ds4mlx.cache import Cache
from ds4mlx.config import TargetConfig
from ds4mlx.convert.config import target_config
from ds4mlx.convert.gguf import Tensor, open_gguf
from ds4mlx.convert.inventory import check_draft, check_target
from ds4mlx.draft import DraftConfig
from ds4mlx.errors import Ds4Error, UsageError
from ds4mlx.ops.experts_grouped import held as held_by_experts
from ds4mlx.packed import Packed
from ds4mlx.preflight import GIB, Device, Need, require
from tests.convert.files import BLOCKS, TARGET_METADATA, write_gguf


def metal(limit, memory=128):
    return Device("metal", "Apple M5 Max", int(memory * GIB), int(limit * GIB))


def cpu(free, memory=64):
    return Device("cpu", "a CPU", int(memory * GIB), int(free * GIB))


def plan(weights, draft=0.0, cache=0.0, workspace=0.0):
    """A plan whose cache is that of 32,768 tokens, and as large as the context."""
    return lambda ctx: Need(
        ctx,
        *(int(n * GIB) for n in (weights, draft, cache * ctx / 32768)),
        workspace=int(workspace * GIB),
    )


def refusal(plan, on, ctx=32768) -> str:
    with pytest.raises(Ds4Error) as error:
        require("m.gguf", plan, ctx, on)
    assert error.value.status == 1
    return str(error.value)


# Injected numbers -----------------------------------------------------------------------------


def test_the_draft_counts_and_the_shortfall_is_told_in_gib():
    """ME-01."""
    both = plan(91, draft=6, cache=2)
    told = refusal(both, metal(93))
    assert "weights 91.0, draft 6.0, cache of 32768 tokens 2.0" in told
    assert f"{99 - 93 * 0.98:.1f} GiB short" in told
    assert require("m.gguf", both, 32768, metal(105)) is None
    assert require("m.gguf", plan(88, cache=2), 32768, metal(93)) is None


@pytest.mark.parametrize(
    "memory, working_set, size, fits", [(128, 107.5, 108, 0), (512, 460, 300, 1)]
)
def test_the_devices_own_figure_decides_and_not_its_memory(memory, working_set, size, fits):
    """ME-02."""
    on = metal(working_set, memory)
    if fits:
        assert require("m.gguf", plan(size), 32768, on) is None
    else:
        assert f"working set of {working_set} GiB" in refusal(plan(size), on)


def test_a_cpu_is_not_filled_beyond_four_fifths_of_free_memory():
    """ME-06."""
    assert require("m.gguf", plan(19), 32768, cpu(24)) is None
    assert "free memory of 24.0 GiB leaves 19.2" in refusal(plan(20), cpu(24))
    told = refusal(plan(81), cpu(24))
    assert "61.8 GiB short" in told and "--force" in told and "swap without end" in told


def test_force_turns_the_refusal_into_a_warning_of_what_is_risked():
    """ME-06."""
    warning = require("m.gguf", plan(120), 32768, metal(107), force=True)
    assert "loaded by force: macOS may page the weights out" in warning


def test_the_refusal_says_that_experts_are_not_streamed():
    """ME-07."""
    assert "Experts are not streamed from disk" in refusal(plan(81), metal(48, 64))


def test_a_raised_limit_is_proposed_where_the_machine_has_the_memory():
    wanted = -(-99 * 1024 * 100 // 98)
    told = refusal(plan(99), metal(96))
    assert f"sudo sysctl iogpu.wired_limit_mb={wanted}" in told or (
        f"sudo sysctl iogpu.wired_limit_mb={wanted + 1}" in told
    )
    assert "sysctl" not in refusal(plan(99), metal(75, 96))


def test_a_smaller_context_is_proposed_where_it_is_enough():
    told = refusal(plan(80, cache=1), metal(83), ctx=1 << 20)
    assert "a context of 32768 (--ctx 32768)" in told
    assert "--ctx" not in refusal(plan(90, cache=1), metal(83), ctx=1 << 20)


def test_leaving_out_the_draft_is_proposed_where_it_is_enough():
    assert "no draft (without --mtp)" in refusal(plan(91, draft=6), metal(94))
    assert "no draft" not in refusal(plan(99, draft=6), metal(94))


def test_the_2_bit_file_is_proposed_where_it_would_fit():
    assert "download ds4f-q2" in refusal(plan(153), metal(107))
    assert "download" not in refusal(plan(153), metal(48))
    assert "download" not in refusal(plan(81), metal(75))


def test_without_any_way_the_memory_is_told_that_it_takes():
    assert "a machine with 82.7 GiB for it" in refusal(plan(81), metal(24, 32))


# Devices --------------------------------------------------------------------------------------


def test_metal_gives_its_recommended_working_set_less_what_is_in_use(monkeypatch):
    info = {
        "device_name": "Apple M3 Max",
        "memory_size": 128 * GIB,
        "max_recommended_working_set_size": 107 * GIB,
    }
    monkeypatch.setattr(preflight, "mx", fake(info, gpu=True, metal=True, active=7 * GIB))
    assert preflight.device() == Device("metal", "Apple M3 Max", 128 * GIB, 100 * GIB)


def test_cuda_gives_the_free_memory_of_the_card(monkeypatch):
    info = {"device_name": "H", "total_memory": 140 * GIB, "free_memory": 139 * GIB}
    monkeypatch.setattr(preflight, "mx", fake(info, gpu=True, metal=False, active=GIB))
    assert preflight.device() == Device("cuda", "H", 140 * GIB, 139 * GIB)


def fake(info, gpu, metal, active):
    return SimpleNamespace(
        device_info=lambda _: info,
        default_device=lambda: "gpu" if gpu else "cpu",
        gpu="gpu",
        metal=SimpleNamespace(is_available=lambda: metal),
        get_active_memory=lambda: active,
    )


def test_this_machine_has_free_memory():
    assert 0 < preflight.free_memory() < preflight.memory()


def test_free_memory_is_read_as_linux_and_macos_write_it():
    linux = "MemTotal:       8039844 kB\nMemFree:          11 kB\nMemAvailable:    4000000 kB\n"
    assert preflight._meminfo(linux) == 4_000_000 * 1024
    macos = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:   100.\n"
        "Pages active:   7.\nPages inactive:   20.\nPages speculative:   3.\n"
        "Pages throttled:   0.\nPages wired down:   9.\nPages purgeable:   4.\n"
    )
    assert preflight._vm_stat(macos) == 127 * 16384


# The estimate ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    with ds4mlx.load(mtp="embedded") as model:
        yield model


def shipped(ctx):
    """The estimate for the embedded pair, from its headers."""
    data = loading.files("ds4mlx") / "data"
    gguf, other = open_gguf(data / loading.EMBEDDED), open_gguf(data / loading.EMBEDDED_DRAFT)
    settings = target_config(gguf)
    draft = check_draft(other, loading.draft_config(other), settings)
    config = TargetConfig.from_dict(settings)
    return preflight.plan(config, check_target(gguf, settings), draft)(ctx)


def held(part) -> dict[int, int]:
    """Bytes of every array below a module, by the identity of the array."""
    if isinstance(part, mx.array):
        return {id(part): part.nbytes}
    if isinstance(part, Packed):
        return held(list(part.planes.values()))
    if isinstance(part, dict):
        return held(list(part.values()))
    if isinstance(part, list | tuple):
        return {k: n for p in part for k, n in held(p).items()}
    if type(part).__module__.startswith("ds4mlx") and not isinstance(
        part, TargetConfig | DraftConfig
    ):
        return held(list(vars(part).values()))
    return {}


def test_the_estimated_weights_are_within_3_percent_of_those_loaded(pair):
    target, both = held(pair._target), held(pair._draft)
    weights = sum(target.values())
    draft = sum(n for key, n in both.items() if key not in target)
    estimate = shipped(1024)
    assert abs(estimate.weights / weights - 1) < 0.03
    rings = sum(r.rows.nbytes for r in pair._draft.cache().rings)
    assert abs(estimate.draft / (draft + rings) - 1) < 0.03


@pytest.mark.parametrize("ctx", [1, 1000, 8192])
def test_the_estimated_cache_is_the_one_that_a_run_makes(pair, ctx):
    assert shipped(ctx).cache == pair.session(ctx=ctx)._cache.nbytes


def test_a_run_stays_within_the_estimate(pair):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pair.generate("x = 1\n" * 104, tokens=2, ctx=1024)._finish()
    taken, estimate = mx.get_peak_memory() - before, shipped(1024)
    assert taken < estimate.cache + estimate.draft + estimate.workspace
    assert estimate.workspace < 3 * taken  # and is no excuse to refuse everything


@pytest.mark.parametrize("ctx", [0, -1, 2.5, "64", float("nan"), True])
def test_a_context_that_is_none_is_refused(pair, ctx):
    with pytest.raises(UsageError, match="^ctx is .* wanted a whole number, at least 1$"):
        preflight.context(ctx, 8192)
    with pytest.raises(UsageError, match="^ctx is "):
        pair.session(ctx=ctx)


@pytest.mark.parametrize(
    "on, rows", [(metal(200), 4096), (metal(30), 2048), (metal(1), 512), (cpu(999), 512)]
)
def test_a_prompt_is_read_in_the_largest_chunks_that_fit(on, rows):
    sizes = {4096: 100, 2048: 20, 512: 5}
    taken = lambda ctx, n: plan(0, workspace=sizes[n])(ctx)  # noqa: E731
    assert preflight.chunk(taken, 32768, on) == rows


def test_a_larger_context_is_read_in_chunks_that_fit_it(pair, monkeypatch):
    sizes = {4096: 100, 2048: 20, 512: 5}
    grown = lambda ctx, n=512: plan(0, workspace=sizes[n] * ctx / 1024)(ctx)  # noqa: E731
    monkeypatch.setattr(pair, "_plan", grown)
    monkeypatch.setattr(pair, "_ctx", 512)
    monkeypatch.setattr(pair, "_chunk", 4096)
    monkeypatch.setattr(preflight, "device", lambda: metal(90))
    assert pair._rows(512, None) == 4096
    assert pair._rows(2048, None) == 2048
    assert pair._rows(2048, 100) == 100
    monkeypatch.setattr(pair, "_chunk", 2048)
    with pytest.raises(Ds4Error, match="GiB short"):
        pair._rows(2048, 4096)


# Files of the full size, by their headers -----------------------------------------------------

FLASH = dict(D=4096, V=129280, H=64, dh=512, Rq=1024, G=8, Ro=1024, E=256, K=6, F=2048)
RATIOS = [0, 0, *(4 if i % 2 == 0 else 128 for i in range(2, 43))]


def flash(gate, down, layers=range(0)) -> dict[str, Tensor]:
    """Tensors of a file of V4 Flash; of `layers`, the experts are Q4_K."""
    out = {
        "embed": ("F16", (129280, 4096)),
        "hc_base": ("F32", (4,)),
        "hc_fn": ("F16", (4, 16384)),
        "hc_scale": ("F32", (1,)),
        "norm": ("F32", (4096,)),
        "head": ("Q8_0", (129280, 4096)),
    }
    for i, ratio in enumerate(RATIOS):
        types = ("Q4_K", "Q4_K") if i in layers else (gate, down)
        out |= {f"{i}.{n}": t for n, t in _block(*types).items()}
        out |= {f"{i}.pool.{n}": t for n, t in _compressor(ratio, 512).items()}
        if ratio == 4:
            out |= {f"{i}.index.{n}": t for n, t in _compressor(ratio, 128).items()}
            out |= {f"{i}.index.q": ("F16", (8192, 1024)), f"{i}.index.proj": ("F16", (64, 4096))}
        out[f"{i}.route"] = ("I32", (129280, 6)) if i < 3 else ("F32", (256,))
    return _tensors(out)


def _block(gate, down, router="F16") -> dict:
    hc = {}
    for part in ("attn", "ffn"):
        hc |= {
            f"{part}.fn": ("F16", (24, 16384)),
            f"{part}.scale": ("F32", (3,)),
            f"{part}.base": ("F32", (24,)),
            f"{part}.norm": ("F32", (4096,)),
        }
    return hc | {
        "q_a": ("Q8_0", (1024, 4096)),
        "q_a_norm": ("F32", (1024,)),
        "q_b": ("Q8_0", (32768, 1024)),
        "kv": ("Q8_0", (512, 4096)),
        "kv_norm": ("F32", (512,)),
        "sinks": ("F32", (64,)),
        "out_a": ("Q8_0", (8192, 4096)),
        "out_b": ("Q8_0", (4096, 8192)),
        "router": (router, (256, 4096)),
        "gate": (gate, (256, 2048, 4096)),
        "up": (gate, (256, 2048, 4096)),
        "down": (down, (256, 4096, 2048)),
        **{f"shared{i}": ("Q8_0", (2048, 4096)) for i in range(3)},
    }


def _compressor(ratio, width) -> dict:
    rows = width * 2 if ratio == 4 else width
    return (
        {
            "ape": ("F16", (ratio, rows)),
            "kv": ("F16", (rows, 4096)),
            "gate": ("F16", (rows, 4096)),
            "norm": ("F32", (width,)),
        }
        if ratio
        else {}
    )


def _tensors(inventory: dict) -> dict[str, Tensor]:
    out = {}
    for at, (name, (kind, shape)) in enumerate(inventory.items()):
        _, elements, size = BLOCKS[kind]
        nbytes = int(np.prod(shape)) // elements * size
        out[name] = Tensor(name, kind, shape, "m.gguf", at, nbytes)
    return out


def flash_config() -> TargetConfig:
    with_flash = dict(
        vocab_size=129280, hidden_size=4096, num_hidden_layers=43, compress_ratios=tuple(RATIOS),
        num_hash_layers=3, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64,
        q_lora_rank=1024, o_groups=8, o_lora_rank=1024, n_routed_experts=256,
        num_experts_per_tok=6, moe_intermediate_size=2048, routed_scaling_factor=1.5,
        swiglu_limit=10.0, sliding_window=128, index_n_heads=64, index_head_dim=128,
        index_topk=512, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6,
        rope_theta=1e4, compress_rope_theta=1.6e5, rope_scaling={},
    )  # fmt: skip
    return TargetConfig(**with_flash)


FILES = {  # bytes of their tensors, each padded to 32
    "ds4f-q2": (flash("IQ2_XXS", "Q2_K"), 86_714_777_664),
    "ds4f-q2-q4": (flash("IQ2_XXS", "Q2_K", range(37, 43)), 97_586_413_632),
    "ds4f-q4": (flash("Q4_K", "Q4_K"), 164_628_168_768),
    "ds4f-mxfp4": (flash("MXFP4", "MXFP4"), 155_971_125_312),
}


@pytest.mark.parametrize("name", FILES)
def test_a_full_size_file_needs_its_tensors_and_little_more(name):
    tensors, published = FILES[name]
    assert len(tensors) == 1328
    assert sum(t.nbytes + -t.nbytes % 32 for t in tensors.values()) == published
    need = preflight.plan(flash_config(), tensors)(32768)
    assert abs(need.weights / published - 1) < 0.03
    assert need.workspace < 4 * GIB


@pytest.mark.parametrize("name", FILES)
def test_the_list_of_downloads_tells_this_need(name):
    need = preflight.plan(flash_config(), FILES[name][0])(32768)
    assert abs(download.TARGETS[name].memory - need.total / GIB) <= 1


@pytest.mark.parametrize("ctx, most", [(1024, 0.2), (100_000, 3), (1 << 20, 25)])
def test_the_cache_of_compressed_layers_is_far_below_a_dense_one(ctx, most):
    """ME-03."""
    need = preflight.plan(flash_config(), FILES["ds4f-q2"][0])(ctx)
    cache = Cache(flash_config(), ctx)
    for ratio, rows in ((4, ctx / 4), (128, ctx / 128)):
        layer = next(layer for layer in cache.layers if layer.ratio == ratio)
        assert abs(layer.entries[0].size / 512 - rows) <= 1
    assert need.cache == cache.nbytes < most * GIB
    assert need.cache < 0.5 * 43 * max(ctx, 1024) * 512 * 4 + GIB / 8


def test_q2_is_read_in_chunks_of_4096_on_a_128_gb_mac():
    needs = preflight.plan(flash_config(), FILES["ds4f-q2"][0])
    assert preflight.chunk(needs, 32768, metal(107.5)) == 4096
    assert needs(32768, 4096).workspace > 2 * needs(32768).workspace


def test_on_cuda_two_pieces_of_the_experts_count(monkeypatch):
    monkeypatch.setattr(preflight, "device", lambda: Device("cuda", "H", 140 * GIB, 139 * GIB))
    need = preflight.plan(flash_config(), FILES["ds4f-q2"][0])(32768, 4096)
    assert 2 * held_by_experts(256, 2048, 4096, 6 * 4096) < need.workspace < 12 * GIB


def test_q2_with_its_draft_fits_a_128_gb_mac_and_not_a_96_gb_one():
    need = preflight.plan(flash_config(), FILES["ds4f-q2"][0])(32768)
    need = replace(need, draft=6 * 10**9)
    assert require("q2", lambda _: need, 32768, metal(107.5)) is None
    assert "short" in refusal(lambda _: need, metal(72, 96))


# Loading --------------------------------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch):
    """A machine on which the embedded model does not fit; nothing may be read."""
    monkeypatch.setattr(preflight, "device", lambda: metal(0.01, 16))

    def never(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Tensor, "read", never)


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(small_machine):
    with pytest.raises(Ds4Error, match=r"nano.gguf needs .* GiB \(weights"):
        ds4mlx.load()


def test_force_reads_it_and_the_first_reply_tells_the_risk(monkeypatch):
    monkeypatch.setattr(preflight, "device", lambda: cpu(0.01))
    with ds4mlx.load(force=True) as model:
        (note,) = model.generate("x").notes
        assert "loaded by force" in note
        assert model.generate("x").notes == []


def test_a_context_counts_that_is_asked_for_when_loading(monkeypatch):
    room = shipped(1024)
    limit = (room.weights + room.cache + room.workspace) / 0.8 / GIB + 1e-4
    monkeypatch.setattr(preflight, "device", lambda: cpu(limit))
    ds4mlx.load(ctx=1024).close()
    with pytest.raises(Ds4Error, match="--ctx 1024"):
        ds4mlx.load(ctx=8192)


def test_the_context_that_was_loaded_for_is_the_default_of_a_run():
    with ds4mlx.load(ctx=64) as model:
        assert model.generate("x").stats["ctx"] == 64
        assert model.session()._cache.ctx == 64


def test_a_longer_context_than_loaded_for_is_judged_when_it_is_asked_for(monkeypatch):
    with ds4mlx.load(ctx=64) as model:
        monkeypatch.setattr(preflight, "device", lambda: cpu(0.01))
        model.generate("x", ctx=64)
        with pytest.raises(Ds4Error, match="weights 0.0, cache of 8192 tokens 0.0"):
            model.generate("x", ctx=8192)
    with ds4mlx.load(ctx=64, force=True) as model:
        assert "loaded by force" in model.generate("x", ctx=8192).notes[0]


def test_the_statistics_of_a_run_tell_the_plan():
    with ds4mlx.load(ctx=64) as model:
        stats = model.generate("x", tokens=1).stats
    room = shipped(64)
    assert stats["planned_bytes"] == room.weights + room.cache + room.workspace
    assert stats["wired_requested_bytes"] == stats["wired_bytes"] == 0  # on a CPU
    assert stats["peak_bytes"] > room.weights


# Wired memory (ME-05) -------------------------------------------------------------------------


@pytest.fixture
def wires(monkeypatch):
    """A Metal device of 100 bytes; its wired limit, and every value that it had."""
    seen = SimpleNamespace(now=7, all=[])

    def set_wired_limit(n):
        assert 0 <= n <= 100, "the device refuses more"
        before, seen.now = seen.now, n
        seen.all.append(n)
        return before

    info = {"max_recommended_working_set_size": 100}
    fake = SimpleNamespace(set_wired_limit=set_wired_limit, device_info=lambda _: info, gpu="gpu")
    monkeypatch.setattr(wired, "mx", fake)
    return seen


def test_what_is_wired_is_the_plan_and_never_more_than_the_device_allows(wires):
    """ME-05."""
    small = wired.Wired(30, metal(1))
    assert (small.requested, small.granted, wires.now) == (30, 30, 37)
    large = wired.Wired(90, metal(1))
    assert (large.requested, large.granted, wires.now) == (90, 63, 100)


def test_models_that_are_open_together_give_back_their_own_shares(wires):
    """ME-05."""
    first, second = wired.Wired(30, metal(1)), wired.Wired(20, metal(1))
    first.release()
    assert wires.now == 27
    first.release()
    second.release()
    assert wires.now == 7


def test_nothing_is_wired_but_on_metal(wires):
    assert wired.Wired(30, cpu(1)).granted == 0 and wires.all == []


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_wired_limit_is_restored_after_success_error_and_interrupt(wires, monkeypatch, error):
    """ME-05."""
    monkeypatch.setattr(preflight, "device", lambda: metal(100))
    with contextlib.suppress(ValueError, KeyboardInterrupt), ds4mlx.load(ctx=64) as model:
        assert wires.now == 100 and model.generate("x").stats["wired_bytes"] == 93
        if error:
            raise error
    assert wires.now == 7


def test_the_wired_limit_is_restored_when_a_model_is_dropped(wires, monkeypatch):
    """ME-05."""
    monkeypatch.setattr(preflight, "device", lambda: metal(100))
    model = ds4mlx.load(ctx=64)
    del model
    gc.collect()
    assert wires.now == 7


def test_a_context_beyond_the_model_is_refused_before_loading(small_machine):
    with pytest.raises(UsageError, match="ctx is 8193, wanted at most the model's 8192"):
        ds4mlx.load(ctx=8193)


def test_both_of_a_pair_count(monkeypatch):
    needs = []
    monkeypatch.setattr(preflight, "require", lambda _, plan, ctx, *__: needs.append(plan(ctx)))
    ds4mlx.load(ctx=64).close()
    ds4mlx.load(ctx=64, mtp="embedded").close()
    alone, both = needs
    assert alone.draft == 0 < both.draft and alone.cache == both.cache
    assert both == shipped(64)


def test_load_has_the_limits_as_keywords():
    parameters = inspect.signature(ds4mlx.load).parameters
    assert parameters["ctx"].default is None and parameters["force"].default is False


def test_a_failed_run_prints_no_speed(monkeypatch, capsys):
    """ME-01: a run that did not come about must not look like a slow one."""
    from ds4mlx import cli

    monkeypatch.setattr(preflight, "device", lambda: metal(0.01, 16))
    assert cli.main(["generate", "x"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "t/s" not in err and err.count("\n") == 1


def test_tied_weights_count_once(tmp_path):
    tensors = {"token_embd.weight": ("F16", (48, 64))}
    gguf = open_gguf(write_gguf(tmp_path / "t.gguf", TARGET_METADATA, tensors))
    embed = gguf.tensors["token_embd.weight"]
    one = preflight.loaded_bytes({"embed.weight": embed})
    assert preflight.loaded_bytes({"embed.weight": embed, "head.weight": embed}) == one
