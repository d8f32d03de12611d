"""Check which package imports which, so that data flows in one direction, and that no two classes have one name."""

from __future__ import annotations

import ast
import collections
import graphlib
import subprocess
import sys
from pathlib import Path

from tests.launch import REPOSITORY

PACKAGES = ("perf_model", "deep_opt_states")

OF_PERF_MODEL = """
.:
units:
json_input:
schedule: json_input units
prediction: json_input schedule units
planner: prediction schedule
plan_request: planner prediction schedule units
training_run: json_input plan_request prediction schedule units
cluster: prediction presets training_run
presets: prediction schedule training_run units
cli: cluster json_input planner prediction presets schedule training_run units
__main__: cli
"""
"""The packages of ``perf_model`` that each of its packages may import, without ``perf_model.``; "." is the package."""

OF_DEEP_OPT_STATES = """
.: activation names
activation: config log names zero.enabled zero.plugin zero.start
names:
accelerate_hook: activation names zero.enabled zero.start
log:
waiting: log
config: names model.json_input model.prediction model.schedule model.units
host: config names
device:
runtime: device model.prediction model.schedule
files:
sharing: files model.json_input
report: files log model.json_input model.prediction model.schedule model.units
profiler: device files host waiting model.prediction model.schedule
zero:
zero.internals: log names runtime waiting model.schedule
zero.step: device log names runtime zero.internals model.plan_request model.prediction model.schedule model.units
zero.start: config device host log names profiler report runtime waiting zero.internals zero.step model.plan_request
    model.planner model.prediction model.schedule model.units
zero.assigned_states: runtime zero.checkpoint_contents model.schedule
zero.guarded_states: log zero.assigned_states zero.checkpoint_contents zero.checkpoint_saving zero.internals
    zero.start zero.step
zero.stage3: config device report runtime zero.assigned_states zero.guarded_states zero.internals zero.start
    zero.step model.prediction model.schedule
zero.checkpoint_contents: zero.internals
zero.checkpoint_saving: zero.internals model.units
zero.checkpoint_check: zero.checkpoint_contents zero.internals
zero.enabled: config log names
zero.plugin: config log names zero.checkpoint_check zero.checkpoint_saving zero.enabled zero.internals zero.stage3
    zero.start zero.step
doctor: activation device host names waiting zero.internals model.prediction model.units
cli: config doctor files names profiler report sharing zero.start model.cli model.prediction model.training_run
"""
"""The same for ``deep_opt_states``; ``model`` is ``perf_model``."""


def allowed_imports(package: str, table: str) -> dict[str, set[str]]:
    """Return the packages that each package of the table may import. A package may always import itself."""

    def full_name(name: str) -> str:
        head, _, tail = name.partition(".")
        return f"perf_model.{tail}" if head == "model" else f"{package}.{name}".rstrip(".")

    rows = [row.partition(":") for row in table.strip().replace("\n    ", " ").splitlines()]
    return {full_name(name): set(map(full_name, allowed.split())) for name, _, allowed in rows}


MAY_IMPORT = allowed_imports("perf_model", OF_PERF_MODEL) | allowed_imports("deep_opt_states", OF_DEEP_OPT_STATES)


def package_of(module: str) -> str:
    """Return the key of ``module`` in ``MAY_IMPORT``: ``deep_opt_states.zero.step`` for ``...zero.step.gradients``."""
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
    for module, names in IMPORTS.items():
        package = package_of(module)
        for name in names:
            if name.split(".")[0] in PACKAGES:
                assert package_of(name) in MAY_IMPORT[package] | {package}, f"{module} imports {name}"


def test_every_package_uses_all_that_it_may_import() -> None:
    used: dict[str, set[str]] = collections.defaultdict(set)
    for module, names in IMPORTS.items():
        used[package_of(module)].update(package_of(name) for name in names)
    assert {package: found for package, allowed in MAY_IMPORT.items() if (found := allowed - used[package])} == {}


def test_one_place_imports_deepspeed_triton_torch_or_starts_programs() -> None:
    def importers(*packages: str, inside: str = "") -> set[str]:
        roots = {module: {name.split(".")[0] for name in names} for module, names in IMPORTS.items()}
        return {module for module, names in roots.items() if module.startswith(inside) and names & {*packages}}

    in_device = importers("deepspeed", inside="deep_opt_states.device")
    assert all(module.startswith("deep_opt_states.device.kernels") for module in in_device)
    assert importers("triton") == {"deep_opt_states.device.kernels.triton_kernel"}
    # The model of a config.json is built by transformers, when one is read.
    third_party = set().union(*(names for module, names in IMPORTS.items() if module.startswith("perf_model")))
    third_party = {name.split(".")[0] for name in third_party} - sys.stdlib_module_names - {*PACKAGES}
    assert third_party == {"matplotlib", "rich", "torch", "transformers"}
    assert importers("torch", "transformers", inside="perf_model") == {"perf_model.training_run.hf_config"}
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
