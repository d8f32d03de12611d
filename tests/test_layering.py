"""Check which package imports which, so that data flows in one direction, and that no two classes have one name."""

from __future__ import annotations

import ast
import collections
import graphlib
import subprocess
from pathlib import Path

from tests.launch import REPOSITORY

PACKAGES = ("perf_model", "deep_opt_states")

LAYERS = {
    "perf_model": """
        units json_input schedule prediction planner plan_request training_run presets cluster cli __main__
    """,
    "deep_opt_states": """
        names device log files sharing waiting config runtime report zero.enabled host zero.internals profiler
        zero.checkpoint_contents zero.checkpoint_saving zero.checkpoint_check zero.step zero.assigned_states zero.start
        zero.guarded_states zero.stage3 zero.plugin activation accelerate_hook doctor cli
    """,
}
"""The packages inside both packages. Each imports only those before it, and ``deep_opt_states`` also ``perf_model``."""

ORDER = ["perf_model", *(f"{outer}.{name}" for outer, names in LAYERS.items() for name in names.split())]


def package_of(module: str) -> str:
    """Return the package of ``module`` in ``LAYERS``: ``deep_opt_states.zero.step`` for ``...zero.step.gradients``."""
    parts = module.split(".")
    return ".".join(parts[:3] if parts[:2] == ["deep_opt_states", "zero"] else parts[:2])


def imports_of(path: Path) -> set[str]:
    """Return all modules that the file imports, also in functions. Relative imports are not allowed."""
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


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


IMPORTS = {name_of(path): imports_of(path) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")}
"""All that each module imports."""


def test_a_module_imports_only_packages_that_its_package_may_import() -> None:
    assert {package_of(module) for module in IMPORTS} - {"deep_opt_states", "deep_opt_states.zero"} == {*ORDER}
    # What users import from the package itself, and from ``zero``, starts everything.
    places = {package: place for place, package in enumerate([*ORDER, "deep_opt_states.zero", "deep_opt_states"])}
    for module, names in IMPORTS.items():
        for name in names:
            if name.split(".")[0] in PACKAGES:
                assert places[package_of(name)] <= places[package_of(module)], f"{module} imports {name}"


def test_one_place_imports_deepspeed_triton_torch_or_starts_programs() -> None:
    def importers(*packages: str, inside: str = "") -> set[str]:
        roots = {module: {name.split(".")[0] for name in names} for module, names in IMPORTS.items()}
        return {module for module, names in roots.items() if module.startswith(inside) and names & {*packages}}

    in_device = importers("deepspeed", inside="deep_opt_states.device")
    assert all(module.startswith("deep_opt_states.device.kernels") for module in in_device)
    assert importers("triton") == {"deep_opt_states.device.kernels.triton_kernel"}
    # The model of a config.json is built by transformers, when one is read.
    users = importers("torch", "transformers", "deepspeed", inside="perf_model")
    assert users == {"perf_model.training_run.hf_config"}
    assert importers("subprocess", "multiprocessing", inside="perf_model") == set()


def test_no_module_imports_itself_through_others() -> None:
    """Check that the imports form no cycle, including the imports inside functions."""
    # An import of a package runs its __init__ only.
    graph = {module: (names & IMPORTS.keys()) - {module} for module, names in IMPORTS.items()}
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
