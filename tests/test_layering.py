"""Check which package imports which, so that data flows in one direction, and that no two classes have one name."""

from __future__ import annotations

import ast
import collections
import graphlib
import subprocess
from pathlib import Path

from tests.launch import REPOSITORY

PACKAGES = ("perf_model", "deep_opt_states")

TABLE = """
model:
model.units:
model.json_input:
model.schedule: model.json_input model.units
model.prediction: model.json_input model.schedule model.units
model.planner: model.prediction model.schedule
model.plan_request: model.planner model.prediction model.schedule model.units
model.training_run: model.json_input model.plan_request model.planner model.prediction model.schedule model.units
model.presets: model.prediction model.schedule model.training_run model.units
model.cluster: model.prediction model.presets model.training_run
model.cli: model.cluster model.json_input model.planner model.prediction model.presets model.schedule
    model.training_run model.units
model.__main__: model.cli
names:
device:
log:
files:
sharing: files model.json_input
waiting: log
config: log model.json_input model.prediction model.schedule model.units names
runtime: device model.prediction model.schedule
report: files log model.json_input model.prediction model.schedule model.units
host: config names
zero.internals: log model.schedule names runtime waiting
profiler: device files host model.prediction model.schedule waiting
zero.checkpoint_saving: model.units zero.internals
zero.checkpoint_check: zero.internals
zero.step: device log model.plan_request model.prediction model.schedule model.units names runtime waiting
    zero.internals
zero.assigned_states: model.schedule runtime zero.checkpoint_check
zero.start: config device host log model.plan_request model.planner model.prediction model.schedule model.units
    names profiler report runtime waiting zero.internals zero.step
zero.guarded_states: log zero.assigned_states zero.checkpoint_check zero.checkpoint_saving zero.internals
    zero.start zero.step
zero.stage3: config device model.prediction model.schedule zero.assigned_states
    zero.guarded_states zero.internals zero.start zero.step
zero.plugin: config log names zero.checkpoint_check zero.checkpoint_saving zero.internals
    zero.stage3 zero.start zero.step
activation: config log names zero.plugin zero.start
doctor: activation device host model.prediction model.units names waiting zero.internals
cli: config doctor files model.cli model.json_input model.prediction model.training_run names profiler report sharing
    zero.start
zero:
deep_opt_states: activation names
"""
"""Each package with its imports, all from rows above: ``model`` is ``perf_model``, the others are the plugin's."""

ROWS = {
    package: {*imported.split()}
    for package, _, imported in (row.partition(":") for row in TABLE.strip().replace("\n    ", " ").splitlines())
}


def package_of(module: str) -> str:
    """Return the package of ``module`` in ``TABLE``: ``zero.step`` for ``deep_opt_states.zero.step.gradients``."""
    parts = module.split(".")
    package = ".".join(parts[:3] if parts[:2] == ["deep_opt_states", "zero"] else parts[:2])
    return package.replace("perf_model", "model").removeprefix("deep_opt_states.")


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


def test_each_package_imports_the_packages_of_its_row_and_none_of_later_rows() -> None:
    found: dict[str, set[str]] = {package_of(module): set() for module in IMPORTS}
    for module, names in IMPORTS.items():
        imported = {package_of(name) for name in names if name.split(".")[0] in PACKAGES}
        found[package_of(module)] |= imported - {package_of(module)}
    assert found == ROWS
    order = list(ROWS)
    assert all(imported <= {*order[:place]} for place, imported in enumerate(ROWS.values()))


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
