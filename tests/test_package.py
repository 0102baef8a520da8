"""Rules that hold for the whole repository: what is exported, who imports whom, what is never used, what it weighs."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparsefinder
from sparsefinder import errors, faiss_choice, shipped

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sparsefinder", "training", "app")
MAX_TRACKED_BYTES = 40 * 2**20
MAX_ARTIFACT_BYTES = 10 * 2**20  # each
MAX_LINES = 400


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def imported(path: Path) -> Iterator[str]:
    """Top-level packages that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_every_exported_name_exists_and_is_documented() -> None:
    assert sorted(sparsefinder.__all__) == sparsefinder.__all__
    assert set(sparsefinder._HOMES) == set(sparsefinder.__all__) - {"__version__"}
    for name in sparsefinder.__all__:
        value = getattr(sparsefinder, name)
        # Importing a submodule puts it on the package: a module of the same name would hide what is exported.
        assert not list((ROOT / "sparsefinder").glob(name)) + list((ROOT / "sparsefinder").glob(f"{name}.py"))
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sparsefinder.no_such_name


def test_version_is_the_installed_one() -> None:
    try:
        installed = importlib.metadata.version("sparsefinder")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("sparsefinder is not installed here")
    assert installed == sparsefinder.__version__


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "('torch', 'numba', 'transformers', 'sklearn')"
    code = f"import sparsefinder, sys; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(("package", "forbidden"), [
    ("sparsefinder", {"training", "app", "benchmarks", "tests"}),
    ("training", {"app", "benchmarks", "tests"}),
    ("app", {"training", "benchmarks", "tests"}),
])  # fmt: skip
def test_imports_point_one_way(package: str, forbidden: set[str]) -> None:
    wrong = {str(path.relative_to(ROOT)): bad for path in sources(package) if (bad := forbidden & set(imported(path)))}
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_nothing_can_run_code_from_data() -> None:
    wrong = []
    for path in sources(*PACKAGES, "benchmarks"):
        text = path.read_text()
        tree = ast.parse(text)
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        attributes = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        bad = calls & {"eval", "exec"}
        bad |= set(imported(path)) & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
        bad |= attributes & {"torch.load", "torch.save", "np.load", "numpy.load"}
        bad |= {"trust_remote_code=True"} & {
            re.sub(r"\s", "", found) for found in re.findall(r"trust_remote_code\s*=\s*\w+", text)
        }
        if bad:
            wrong.append((str(path.relative_to(ROOT)), sorted(bad)))
    assert wrong == []


def test_errors_are_one_level_deep_and_documented() -> None:
    for path in sources(*PACKAGES):
        importable = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not importable.endswith(("__init__", "__main__", "demo")):
            importlib.import_module(importable)
    kinds = errors.SparsefinderError.__subclasses__()
    assert kinds
    for kind in kinds:
        assert kind.__doc__, f"{kind.__name__} has no docstring"
        assert kind.__subclasses__() == [], f"{kind.__name__} has subclasses"
        assert kind.__module__ == errors.__name__, f"{kind.__name__} lives outside sparsefinder.errors"


def test_tracked_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < MAX_TRACKED_BYTES
    for folder in (ROOT / "artifacts").iterdir():
        assert sum(path.stat().st_size for path in tracked() if folder in path.parents) < MAX_ARTIFACT_BYTES, folder


def test_no_source_file_is_endless() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in sources(*PACKAGES, "benchmarks")
            if (lines := path.read_text().count("\n")) > MAX_LINES}  # fmt: skip
    assert long == {}


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "artifacts").glob("*.md")]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = document.parent / path if path else document
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{document.name}: {target}")
    assert broken == []


def anchors(document: Path) -> set[str]:
    """The anchors that readers' software makes of the headings."""
    headings = re.findall(r"^#+\s+(.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


class TestFaiss:
    def install(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        monkeypatch.setattr(faiss_choice, "_installed", lambda name: name in names)
        faiss_choice._say_once.cache_clear()

    def test_both_wheels_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, "faiss-cpu", "faiss-gpu")
        with pytest.raises(errors.ConfigError, match="found faiss-cpu and faiss-gpu"):
            faiss_choice.check_faiss_wheels()
        with pytest.raises(errors.ConfigError, match="faiss"):
            faiss_choice.kmeans_backend()

    @pytest.mark.parametrize("failure", [ImportError("no module"), OSError("bad binary"), AttributeError("numpy")])
    def test_a_failing_import_falls_to_sklearn_and_says_so_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception
    ) -> None:
        self.install(monkeypatch)

        def fail(name: str) -> None:
            raise failure

        monkeypatch.setattr(faiss_choice.importlib, "import_module", fail)
        assert faiss_choice.kmeans_backend() == "sklearn"
        assert faiss_choice.kmeans_backend() == "sklearn"
        assert len(caplog.records) == 1
        assert "scikit-learn" in caplog.text

    @pytest.mark.parametrize(("gpus", "expected"), [(0, "faiss-cpu"), (1, "faiss-gpu")])
    def test_the_gpu_is_used_where_there_is_one(
        self, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str
    ) -> None:
        self.install(monkeypatch, "faiss-gpu")
        fake = type("faiss", (), {"StandardGpuResources": object, "get_num_gpus": staticmethod(lambda: gpus)})
        monkeypatch.setattr(faiss_choice.importlib, "import_module", lambda name: fake)
        assert faiss_choice.kmeans_backend() == expected

    def test_what_is_installed_here_works(self) -> None:
        assert faiss_choice.kmeans_backend() in ("faiss-gpu", "faiss-cpu", "sklearn")


class TestShippedArtifact:
    def test_it_is_found(self) -> None:
        assert (shipped.default_artifact() / "card.json").is_file()

    def test_a_missing_one_is_named(self) -> None:
        with pytest.raises(errors.ArtifactError, match="no-such-artifact"):
            shipped.default_artifact("no-such-artifact")
