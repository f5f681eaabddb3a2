"""Finds the engines that are installed, the built-in ones and those of other packages, and asks them what they can do here."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import MethodType
from typing import Literal, cast, get_args

from flowbench.cell import Case, Device
from flowbench.engine import Engine, Tunes
from flowbench.errors import FlowbenchError, unknown_name

Question = Literal["unavailable", "advice", "gpu_refusal", "unsupported"]

ENTRY_POINT_GROUP = "flowbench.engines"
_LONGEST_NAME = 200

# What an engine may lack that is no subclass of Engine: it was written before they were asked for, or has nothing to say.
_OPTIONAL = ("devices", "tunes", "load", "open", "gpu_refusal")

# Listed here rather than as entry points of the own package, so that a checkout that is not installed has them too.
_BUILT_IN = {
    "flow-eager": "flowbench.engines.flow:FlowEager",
    "torch-eager": "flowbench.engines.torch:TorchEager",
    "torch-channels-last": "flowbench.engines.torch:TorchChannelsLast",
    "torch-eager-benchmark": "flowbench.engines.torch:TorchEagerBenchmark",
    "torch-channels-last-benchmark": "flowbench.engines.torch:TorchChannelsLastBenchmark",
    "flow-eager-untimed": "flowbench.engines.flow:FlowEagerUntimed",
    "flow-eager-ungrouped": "flowbench.engines.flow:FlowEagerUngrouped",
    "torch-channels-last-static": "flowbench.engines.torch:TorchChannelsLastStatic",
}


def engine_names() -> list[str]:
    """The names of all engines known here, built-in ones first; available or not."""
    return list(_sources())


def skipped_engines() -> dict[str, str]:
    """Names that more than one package gives, each with a sentence that says which is used and which is skipped."""
    return _registry()[1]


def load_engine(name: str) -> Engine:
    """The engine registered as `name`; FlowbenchError for an unknown name, one that does not load or one that is no engine.

    What it may lack it has then, as Engine gives it.
    """
    sources = _sources()
    if name not in sources:
        raise unknown_name("engine", name, sources)
    source = sources[name]
    module, _, attribute = source.partition(":")
    try:
        engine = getattr(importlib.import_module(module), attribute)()
    except (Exception, SystemExit) as error:
        # A foreign package may raise anything; whatever it is, this engine is the one that does not load.
        raise FlowbenchError(f"engine {name!r} does not load from {source!r}: {_in_one_line(error)}") from error
    lacks = _lacks(engine)
    if lacks is not None:
        raise FlowbenchError(f"engine {name!r} from {source!r} is no engine: {lacks}; see flowbench.engine.Engine")
    return _completed(engine)


def device_refusal(engine: Engine, device: Device) -> str | None:
    """Why `engine` cannot run on `device`; None where it can. An engine that names no devices runs on the CPU."""
    devices = engine.devices
    return None if device in devices else f"it does not run on {device}, but on {', '.join(map(str, devices))}"


def ask(engine: Engine, question: Question, *about: Case) -> str | None:
    """What `engine` answers; FlowbenchError where it raises, or answers with something else than a text or None."""
    try:
        answer = getattr(engine, question)(*about)
    except (Exception, SystemExit) as error:
        raise FlowbenchError(f"its {question}() raised {_in_one_line(error)}") from error
    if answer is None or isinstance(answer, str):
        return answer
    raise FlowbenchError(f"its {question}() answered {str(answer)[:100]!r}, expected a text or None")


def _lacks(engine: object) -> str | None:
    """What keeps an object from being an engine; None where nothing does."""
    for name in ("display_name", "library"):
        text = getattr(engine, name, None)
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_NAME:
            return f"its {name} is {str(text)[:40]!r}, expected a text of 1 to {_LONGEST_NAME} characters"
    for name in ("build", "unavailable", "version", "advice", "unsupported"):
        if not callable(getattr(engine, name, None)):
            return f"it has no method {name}"
    if getattr(type(engine), "build", None) is Engine.build:
        return "it has no method build of its own"
    tunes, choices = getattr(engine, "tunes", Engine.tunes), get_args(Tunes)
    return None if tunes in choices else f"its tunes is {str(tunes)[:40]!r}, expected one of {', '.join(choices)}"


def _completed(engine: object) -> Engine:
    for name in _OPTIONAL:
        if not hasattr(engine, name):
            default = getattr(Engine, name)
            setattr(engine, name, MethodType(default, engine) if callable(default) else default)
    return cast(Engine, engine)


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _sources() -> dict[str, str]:
    return _registry()[0]


def _registry() -> tuple[dict[str, str], dict[str, str]]:
    """Where each engine comes from; and what is skipped, since its name is taken: one package must not stop all others."""
    sources, skipped = dict(_BUILT_IN), {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        used = sources.setdefault(point.name, point.value)
        if used != point.value:
            skipped[point.name] = (
                f"engine {point.name!r} is given twice: {used!r} is used, {point.value!r} is skipped; "
                f"rename one in its package's entry points ({ENTRY_POINT_GROUP})"
            )
    return sources, skipped
