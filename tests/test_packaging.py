"""What is installed is whole: from a checkout, an sdist or a wheel, on paths with spaces."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import ds4mlx

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "ds4mlx", "convert", "metal")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]


def run(*words, cwd, **variables) -> str:
    """The standard output of a command that succeeds."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("a b") / "my ds4mlx"
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", ".ruff_cache", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout):
    """The sdist, unpacked."""
    code = "from setuptools.build_meta import build_sdist; build_sdist('../out of it')"
    run(sys.executable, "-c", code, cwd=checkout)
    (archive,) = (checkout.parent / "out of it").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(archive.parent, filter="data")
    return archive.parent / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheels(checkout, sdist):
    """The wheels of the checkout and of its sdist."""
    found = []
    for source in (checkout, sdist):
        out = checkout.parent / f"wheel of {source.name}"
        run(*PIP, "wheel", *OFFLINE, "--wheel-dir", out, source, cwd=checkout.parent)
        found += out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """A folder with the wheel of the sdist installed."""
    target = tmp_path_factory.mktemp("site packages")
    run(*PIP, "install", *OFFLINE, "--target", target, wheels[1], cwd=target)
    return target


def test_the_sdist_holds_all_that_a_wheel_needs(sdist):
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "ds4mlx/data/nano.gguf"):
        assert (sdist / name).is_file()


def test_the_wheel_holds_every_module_the_models_and_the_licences(wheels):
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "ds4mlx").rglob("*.py")}
    modules |= {f"ds4mlx/convert/{p.name}" for p in (ROOT / "convert").glob("*.py")}
    assert modules <= names
    for folder in ("data", "metal"):
        files = {p.name for p in (ROOT / "ds4mlx" / folder).iterdir()}
        assert files and {f"ds4mlx/{folder}/{name}" for name in files} <= names
    ends = {name.partition(".dist-info/")[2] for name in names}
    assert {"licenses/LICENSE", "licenses/NOTICE", "entry_points.txt"} <= ends
    assert not [name for name in names if name.startswith(("tests/", "convert/", "metal/"))]


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(wheels):
    of_checkout, of_sdist = (zipfile.ZipFile(path) for path in wheels)
    contents = [{i.filename: i.CRC for i in z.infolist()} for z in (of_checkout, of_sdist)]
    assert contents[0] == contents[1]


def test_the_installed_command_tells_its_version(installed, tmp_path):
    out = run(installed / "bin/ds4mlx", "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert out == f"ds4mlx {ds4mlx.__version__}\n"


def test_the_installed_command_completes_with_the_embedded_model(installed, tmp_path):
    words = ["generate", "import os", "-n", "2"]
    out = run(installed / "bin/ds4mlx", *words, cwd=tmp_path, PYTHONPATH=str(installed))
    assert out.strip()


def test_an_editable_install_runs_the_checkout(checkout, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "v e", cwd=tmp_path)
    python = tmp_path / "v e/bin/python"
    # The new environment is empty; what builds and what is imported comes from this one.
    here = sysconfig.get_path("purelib")
    words = ["install", *OFFLINE, "--ignore-installed", "--editable", checkout]
    run(*PIP, "--python", python, *words, cwd=tmp_path, PYTHONPATH=here)
    assert run(tmp_path / "v e/bin/ds4mlx", "--version", cwd=tmp_path).startswith("ds4mlx ")
    code = f"import sys; sys.path.append({here!r}); import ds4mlx, ds4mlx.convert.gguf as g; "
    code += "print(ds4mlx.__file__, g.__file__, sep='\\n')"
    package, reader = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert Path(package).is_relative_to(checkout)
    assert Path(reader).resolve() == (checkout / "convert/gguf.py").resolve()
