"""Check which package imports which, so that data flows in one direction, and that no two classes have one name."""

from __future__ import annotations

import ast
import collections
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

PACKAGES = ("perf_model", "deep_opt_states")

MAY_IMPORT: dict[str, set[str]] = {
    "perf_model": set(),
    "perf_model.units": set(),
    "perf_model.json_input": set(),
    "perf_model.schedule": {"perf_model.json_input", "perf_model.units"},
    "perf_model.prediction": {"perf_model.json_input", "perf_model.schedule", "perf_model.units"},
    "perf_model.planner": {"perf_model.prediction", "perf_model.schedule"},
    "perf_model.plan_request": {
        "perf_model.planner",
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.units",
    },
    "perf_model.training_run": {
        "perf_model.json_input",
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.plan_request",
        "perf_model.units",
    },
    "perf_model.cluster": {
        "perf_model.prediction",
        "perf_model.presets",
        "perf_model.training_run",
    },
    "perf_model.presets": {
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.training_run",
        "perf_model.units",
    },
    "perf_model.cli": {
        "perf_model.cluster",
        "perf_model.json_input",
        "perf_model.prediction",
        "perf_model.presets",
        "perf_model.schedule",
        "perf_model.planner",
        "perf_model.training_run",
        "perf_model.units",
    },
    "perf_model.__main__": {"perf_model.cli"},
    "deep_opt_states": {"deep_opt_states.activation", "deep_opt_states.names"},
    "deep_opt_states.activation": {
        "deep_opt_states.config",
        "deep_opt_states.log",
        "deep_opt_states.names",
        "deep_opt_states.zero.enabled",
        "deep_opt_states.zero.plugin",
        "deep_opt_states.zero.start",
    },
    "deep_opt_states.names": set(),
    "deep_opt_states.accelerate_hook": {
        "deep_opt_states.activation",
        "deep_opt_states.names",
        "deep_opt_states.zero.enabled",
        "deep_opt_states.zero.start",
    },
    "deep_opt_states.log": set(),
    "deep_opt_states.waiting": {"deep_opt_states.log"},
    "deep_opt_states.config": {
        "deep_opt_states.names",
        "perf_model.json_input",
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.units",
    },
    "deep_opt_states.host": {"deep_opt_states.config", "deep_opt_states.names"},
    "deep_opt_states.device": set(),
    "deep_opt_states.runtime": {"deep_opt_states.device", "perf_model.prediction", "perf_model.schedule"},
    "deep_opt_states.files": set(),
    "deep_opt_states.sharing": {"deep_opt_states.files", "perf_model.json_input"},
    "deep_opt_states.report": {
        "deep_opt_states.files",
        "deep_opt_states.log",
        "perf_model.json_input",
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.units",
    },
    "deep_opt_states.profiler": {
        "deep_opt_states.device",
        "deep_opt_states.files",
        "deep_opt_states.host",
        "deep_opt_states.waiting",
        "perf_model.prediction",
        "perf_model.schedule",
    },
    "deep_opt_states.zero": set(),
    "deep_opt_states.zero.internals": {
        "deep_opt_states.log",
        "deep_opt_states.names",
        "deep_opt_states.runtime",
        "deep_opt_states.waiting",
        "perf_model.schedule",
    },
    "deep_opt_states.zero.step": {
        "deep_opt_states.device",
        "deep_opt_states.log",
        "deep_opt_states.names",
        "deep_opt_states.runtime",
        "deep_opt_states.zero.internals",
        "perf_model.plan_request",
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.units",
    },
    "deep_opt_states.zero.start": {
        "deep_opt_states.config",
        "deep_opt_states.device",
        "deep_opt_states.host",
        "deep_opt_states.log",
        "deep_opt_states.names",
        "deep_opt_states.profiler",
        "deep_opt_states.report",
        "deep_opt_states.runtime",
        "deep_opt_states.waiting",
        "deep_opt_states.zero.internals",
        "deep_opt_states.zero.step",
        "perf_model.plan_request",
        "perf_model.planner",
        "perf_model.prediction",
        "perf_model.schedule",
        "perf_model.units",
    },
    "deep_opt_states.zero.assigned_states": {
        "deep_opt_states.runtime",
        "deep_opt_states.zero.checkpoint_contents",
        "perf_model.schedule",
    },
    "deep_opt_states.zero.guarded_states": {
        "deep_opt_states.log",
        "deep_opt_states.zero.assigned_states",
        "deep_opt_states.zero.checkpoint_contents",
        "deep_opt_states.zero.checkpoint_saving",
        "deep_opt_states.zero.internals",
        "deep_opt_states.zero.start",
        "deep_opt_states.zero.step",
    },
    "deep_opt_states.zero.stage3": {
        "deep_opt_states.config",
        "deep_opt_states.device",
        "deep_opt_states.report",
        "deep_opt_states.runtime",
        "deep_opt_states.zero.assigned_states",
        "deep_opt_states.zero.guarded_states",
        "deep_opt_states.zero.internals",
        "deep_opt_states.zero.start",
        "deep_opt_states.zero.step",
        "perf_model.prediction",
        "perf_model.schedule",
    },
    "deep_opt_states.zero.checkpoint_contents": {"deep_opt_states.zero.internals"},
    "deep_opt_states.zero.checkpoint_saving": {"deep_opt_states.zero.internals", "perf_model.units"},
    "deep_opt_states.zero.checkpoint_check": {
        "deep_opt_states.zero.checkpoint_contents",
        "deep_opt_states.zero.internals",
    },
    "deep_opt_states.zero.enabled": {
        "deep_opt_states.config",
        "deep_opt_states.log",
        "deep_opt_states.names",
    },
    "deep_opt_states.zero.plugin": {
        "deep_opt_states.config",
        "deep_opt_states.log",
        "deep_opt_states.names",
        "deep_opt_states.zero.checkpoint_check",
        "deep_opt_states.zero.checkpoint_saving",
        "deep_opt_states.zero.enabled",
        "deep_opt_states.zero.internals",
        "deep_opt_states.zero.stage3",
        "deep_opt_states.zero.start",
        "deep_opt_states.zero.step",
    },
    "deep_opt_states.doctor": {
        "deep_opt_states.activation",
        "deep_opt_states.device",
        "deep_opt_states.host",
        "deep_opt_states.names",
        "deep_opt_states.waiting",
        "deep_opt_states.zero.internals",
        "perf_model.prediction",
        "perf_model.units",
    },
    "deep_opt_states.cli": {
        "deep_opt_states.config",
        "deep_opt_states.doctor",
        "deep_opt_states.files",
        "deep_opt_states.names",
        "deep_opt_states.profiler",
        "deep_opt_states.report",
        "deep_opt_states.sharing",
        "deep_opt_states.zero.start",
        "perf_model.cli",
        "perf_model.prediction",
        "perf_model.training_run",
    },
}
"""The packages that each package may import. A package may always import itself."""

THIRD_PARTY: dict[str, set[str]] = {
    "perf_model": {"matplotlib", "rich"},
    # The model of a config.json is built by transformers, when one is read.
    "perf_model.training_run": {"torch", "transformers"},
    "deep_opt_states.activation": {"wrapt"},
    "deep_opt_states.config": {"pydantic"},
    "deep_opt_states.accelerate_hook": {"wrapt"},
    "deep_opt_states.waiting": {"torch", "wrapt"},
    "deep_opt_states.device": {"torch", "deepspeed", "numpy", "triton"},
    "deep_opt_states.runtime": {"torch"},
    "deep_opt_states.report": {"jinja2"},
    "deep_opt_states.sharing": {"torch"},
    "deep_opt_states.zero": {"torch", "deepspeed", "packaging"},
    "deep_opt_states.host": {"psutil", "torch"},
    # The profiler uses DeepSpeed's Adam op, which no training has constructed yet.
    "deep_opt_states.profiler": {"torch", "deepspeed"},
    "deep_opt_states.doctor": {"torch", "deepspeed", "packaging"},
    "deep_opt_states.cli": {"rich", "deepspeed", "hjson"},
}
"""The third-party packages that each package, or the packages inside it, may import."""


def third_party(package: str) -> set[str]:
    return set().union(*(allowed for name, allowed in THIRD_PARTY.items() if f"{package}.".startswith(f"{name}.")))


def package_of(module: str) -> str:
    """Return the key of ``module`` in ``MAY_IMPORT``: ``deep_opt_states.zero.step`` for ``...zero.step.gradients``."""
    parts = module.split(".")
    return ".".join(parts[:3] if parts[:2] == ["deep_opt_states", "zero"] else parts[:2])


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(path: Path) -> set[str]:
    """Return all modules that the file imports, including imports in functions. Relative imports are not allowed."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from deep_opt_states.zero import plugin` imports a module, and nothing else of the package.
            folder = REPOSITORY / node.module.replace(".", "/")
            are_modules = {alias.name: (folder / f"{alias.name}.py").exists() for alias in node.names}
            names |= {f"{node.module}.{name}" if is_module else node.module for name, is_module in are_modules.items()}
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=[module for module, _ in modules()])
def test_a_module_imports_only_packages_that_its_package_may_import(module: str, path: Path) -> None:
    package = package_of(module)
    for name in imports(path):
        if name.split(".")[0] in PACKAGES:
            assert package_of(name) in MAY_IMPORT[package] | {package}, f"{module} imports {name}"
        elif name.split(".")[0] not in sys.stdlib_module_names:
            assert name.split(".")[0] in third_party(package), f"{module} imports {name}"


def test_every_package_uses_all_that_it_may_import() -> None:
    used: dict[str, set[str]] = collections.defaultdict(set)
    for module, path in modules():
        for name in imports(path):
            ours = name.split(".")[0] in PACKAGES
            used[package_of(module)].add(package_of(name) if ours else name.split(".")[0])
    assert {package: found for package, allowed in MAY_IMPORT.items() if (found := allowed - used[package])} == {}
    for outer, allowed in THIRD_PARTY.items():
        inside = [packages for package, packages in used.items() if f"{package}.".startswith(f"{outer}.")]
        assert allowed - set().union(*inside) == set(), outer


def test_in_device_only_the_kernels_import_deepspeed() -> None:
    for module, path in modules():
        if package_of(module) == "deep_opt_states.device" and ".kernels" not in module:
            assert not {name for name in imports(path) if name.startswith("deepspeed")}, module


def test_only_the_triton_kernels_import_triton() -> None:
    found = {name for name, path in modules() if any(imported.split(".")[0] == "triton" for imported in imports(path))}
    assert found == {
        "deep_opt_states.device.kernels.triton_kernel",
    }


def test_only_the_model_of_a_config_needs_torch_in_perf_model() -> None:
    names = ("torch", "transformers")
    found = {module for module, path in modules() if module.startswith("perf_model") and imports(path) & {*names}}
    assert found == {"perf_model.training_run.hf_config"}


def test_perf_model_starts_no_program() -> None:
    for module, path in modules():
        if module.startswith("perf_model"):
            assert not imports(path) & {"subprocess", "multiprocessing"}, module


def test_perf_model_imports_neither_torch_nor_matplotlib_nor_deepspeed() -> None:
    # Importing __main__ would run the program.
    names = [name for name, _ in modules() if name.startswith("perf_model") and not name.endswith("__main__")]
    code = (
        f"import sys\nfor name in {names}: __import__(name)\n"
        "print([name for name in ('torch', 'deepspeed', 'matplotlib', 'deep_opt_states') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_imports_itself_through_others() -> None:
    """Check that the imports form no cycle, including the imports inside functions."""
    graph = {module: {name for name in imports(path) if name != module} for module, path in modules()}
    names = graph.keys()
    # An import of a package runs its __init__ only.
    graph = {module: imported & names for module, imported in graph.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_no_two_classes_of_the_repository_have_the_same_name() -> None:
    """Check all classes, including those inside functions and classes. Leading underscores make no difference."""
    tracked = subprocess.check_output(["git", "ls-files", "*.py"], cwd=REPOSITORY, text=True).splitlines()
    places = collections.defaultdict(list)
    for path in tracked:
        # A file that was moved or deleted is tracked until the next commit.
        if (REPOSITORY / path).exists():
            for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    assert len(places) > 100, "the classes are found"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
