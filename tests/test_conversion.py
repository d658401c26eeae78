"""The bench of conversion, on the smallest file that it can make."""

from ds4mlx.conversion import TITLES, made, rows
from ds4mlx.convert.gguf import open_gguf


def test_the_bench_of_conversion_measures_every_step_and_start():
    found = list(rows(0, runs=1))
    starts = [
        f"{what}, {of}"
        for of in ("GGUF", "folder")
        for what in ("open", "open and load", "start to first token")
    ]
    assert [row[0] for row in found] == [
        "copy and flush, to compare",
        "convert",
        "verify",
        "reverse",
        *starts,
    ]
    assert all(len(row) == len(TITLES) for row in found)
    assert all(0 < int(row[2]) < 2000 for row in found[1:4])


def test_the_file_that_is_measured_has_every_type_of_experts_and_about_the_size(tmp_path):
    size = made(tmp_path / "large.gguf", 90 * 10**6)
    experts = {t.type for n, t in open_gguf(tmp_path / "large.gguf").tensors.items() if "exps" in n}
    assert experts == {"IQ2_XXS", "Q2_K", "MXFP4", "Q8_0"}
    assert abs(size - 90e6) < 25e6
