"""Check that the plugin uses DeepSpeed's private names, which any release may change, in ``zero/internals/`` only."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.zero.internals.private_names import (
    ATTRIBUTES,
    HOOKS,
    METHODS,
    SINCE,
    missing_names,
)
from deep_opt_states.zero.stage3 import DeepOptimizerStates_Stage3

PACKAGE = Path(__file__).resolve().parents[2] / "deep_opt_states"
INTERNALS = PACKAGE / "zero" / "internals"

ALLOWED_NAMES = {
    # It must not import zero/internals before it knows that the config has our block.
    "activation.py": {"_config", "_configure_zero_optimizer", "_do_sanity_check", "_initialize_params", "_param_dict"},
    # Private names of PyTorch, not of DeepSpeed.
    "device/cuda.py": {"_C", "_host_emptyCache", "_sleep"},
    "runtime/actions.py": {"_foreach_copy_"},
    "device/kernels/library.py": {"_get_build_directory"},
    "doctor.py": {"_get_build_directory"},
    "waiting.py": {"_get_build_directory", "_get_default_store", "_current_frames"},
    # A private name of transformers, which decides what ``save_pretrained`` leaves out.
    "sharing/layers.py": {"_tied_weights_keys"},
}
"""Private names of other packages that a file outside ``zero/internals`` may use, each with the reason."""


def test_private_names_of_deepspeed_are_used_in_one_folder_only() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    ours = defined_private_names(sources.values())
    found = [
        f"{file}:{line}: {name}"
        for file, source in sources.items()
        if not (PACKAGE / file).is_relative_to(INTERNALS)
        for line, name in foreign_private_names(source, ours)
        if name not in ALLOWED_NAMES.get(file, ())
    ]
    assert found == [], "read or call it through a function in zero/internals/"
    for file, names in ALLOWED_NAMES.items():
        used = {name for _, name in foreign_private_names(sources[file], ours)}
        assert names <= used, f"{file} does not use {names - used}: remove them from ALLOWED_NAMES"


def test_the_list_has_every_private_name_of_deepspeed_that_is_used() -> None:
    sources = [path.read_text() for path in sorted(INTERNALS.glob("*.py")) if path.name != "private_names.py"]
    found = {name for source in sources for _, name in foreign_private_names(source, defined_private_names(sources))}
    # Names of PyTorch, and mangled names without their class.
    of_torch = {"_RecordFunctionFast", "_load_from_state_dict", "_scale_fn_custom", "_schedulers"}
    of_torch |= {"_load_state_dict_post_hooks", "_load_state_dict_pre_hooks"}
    used = {re.sub(r"^_[A-Za-z0-9_]+?__", "__", name) for name in found - of_torch}
    listed = {name for names in (*METHODS.values(), *ATTRIBUTES.values()) for name in names if name.startswith("_")}
    assert used | ALLOWED_NAMES["activation.py"] == listed - HOOKS.keys()


def test_the_list_has_every_hook_that_is_overridden() -> None:
    classes = DeepOptimizerStates_Stage3.__mro__
    ours = classes[: classes.index(DeepSpeedZeroOptimizer_Stage3)]
    overridden = {
        name
        for owner in ours
        for name, member in vars(owner).items()
        if callable(member) and hasattr(DeepSpeedZeroOptimizer_Stage3, name) and not name.startswith("__")
    }
    assert overridden == HOOKS.keys()
    of_any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    passing = {
        name
        for name in HOOKS
        for parameter in inspect.signature(getattr(DeepOptimizerStates_Stage3, name)).parameters.values()
        if parameter.kind in of_any_number
    }
    assert passing == {name for name, parameters in HOOKS.items() if parameters.endswith("*")}


def test_a_missing_name_and_other_parameters_are_found() -> None:
    assert missing_names() == [], "this release has all"
    place = "deepspeed.runtime.config:DeepSpeedConfig"
    found = missing_names(
        {place: {"_initialize_params": "config_dict", "_gone": ""}, "deepspeed.gone:Gone": {"_method": ""}},
        {place: ("_param_dict", "_gone_attribute")},
    )
    assert found == [
        "DeepSpeedConfig._gone is missing",
        "DeepSpeedConfig._gone_attribute is missing",
        "DeepSpeedConfig._initialize_params has the parameters (param_dict), expected (config_dict)",
        "Gone._method is missing",
    ]


@pytest.mark.parametrize(
    ("name", "parameters", "can_be_used"),
    [
        ("_pre_step", "self", True),
        ("_pre_step", "self, closure=None", False),
        # One whose override passes further arguments on.
        ("reload_states", "self, non_blocking=False, stream=None", True),
        ("reload_states", "self, stream=None", False),
        # A method that the plugin calls.
        ("_get_ckpt_name", "self, checkpoints_path, tag, rank=0, *, suffix='', **kwargs", True),
        ("_get_ckpt_name", "self, checkpoints_path, tag, *, rank", False),
        ("_get_ckpt_name", "self, tag, checkpoints_path", False),
    ],
)
def test_parameters_that_the_plugin_cannot_use_are_found(
    name: str, parameters: str, can_be_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text(f"class Seeded:\n    def {name}({parameters}): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    (expected,) = {methods[name] for methods in METHODS.values() if name in methods}
    found = missing_names({f"{tmp_path.name}:Seeded": {name: expected}}, {})
    assert [line.partition(" has the parameters")[0] for line in found] == ([] if can_be_used else [f"Seeded.{name}"])


def test_a_method_that_older_releases_lack_is_missed_in_a_newer_one() -> None:
    methods = {"deepspeed.runtime.config:DeepSpeedConfig": {"_gone": ""}}
    with mock.patch.dict(SINCE, {"_gone": "0.18.5"}):
        assert missing_names(methods, {}) == ["DeepSpeedConfig._gone is missing"]
    with mock.patch.dict(SINCE, {"_gone": "99.0"}):
        assert missing_names(methods, {}) == []


def test_a_private_name_that_is_used_elsewhere_is_found() -> None:
    # A class of ours that is no base class also defines it.
    ours = {"_get_ckpt_name"}
    for source, name in {
        "def f(engine): return engine._config": "_config",
        "from deepspeed.utils.groups import _get_data_parallel_group": "_get_data_parallel_group",
        "def f(optimizer): return getattr(optimizer, '_grad_acc_hooks', ())": "_grad_acc_hooks",
        "class Ours(Stock):\n    def step(self): return super()._pre_step()": "_pre_step",
        "class Ours(Stock):\n    def step(self): return self._get_ckpt_name()": "_get_ckpt_name",
    }.items():
        assert name in [found for _, found in foreign_private_names(source, ours)]


@cache
def names_of_deepspeed() -> frozenset[str]:
    """Return the private names that DeepSpeed's engine, config, CPU optimizer, utilities and ZeRO define."""
    root = Path(deepspeed.__file__).parent
    folders = ("runtime/*.py", "runtime/zero/*.py", "utils/*.py", "ops/adam/*.py")
    return frozenset(defined_private_names(path.read_text() for folder in folders for path in root.glob(folder)))


@cache
def files_by_class() -> dict[str, str]:
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    return {name: source for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)}


def defined_private_names(sources: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and is_self(node.value) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def foreign_private_names(source: str, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of a private name that is not one of ours.

    A name of ``ours`` that DeepSpeed also defines counts as DeepSpeed's. An attribute of ``self`` is ours if this file
    or a base class's defines it. An override may call the method that it overrides.
    """
    own = ours - names_of_deepspeed()
    bases = re.findall(r"^class \w+\((\w+)(?:\[.*\])?\):", source, re.MULTILINE)
    of_self = defined_private_names([source, *(files_by_class()[base] for base in bases if base in files_by_class())])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            of_super = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute) and is_super(inner.value))
            yield from (
                (inner.lineno, inner.attr) for inner in of_super if is_private(inner.attr) and inner.attr != node.name
            )
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_super(node.value) and node.attr not in (of_self if is_self(node.value) else own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if not (getattr(node, "module", None) or "").startswith("deep_opt_states"):
                yield from ((node.lineno, one.name) for one in node.names if any(map(is_private, one.name.split("."))))
        elif isinstance(node, ast.Constant) and names_attribute_of_deepspeed(str(node.value)):
            yield node.lineno, node.value


def names_attribute_of_deepspeed(text: str) -> bool:
    """Return whether it is such a name, and not a suffix as ``_bytes_per_s``. Python makes ``_Class__name`` of two."""
    return is_private(text) and (text in names_of_deepspeed() or bool(re.match(r"_[A-Za-z]\w*?__", text)))


def is_private(name: str) -> bool:
    # ``_asdict`` is a public name of named tuples.
    return name.startswith("_") and not name.startswith("__") and name.strip("_") not in ("", "asdict")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
