"""Fills Jinja templates, the package's own or a user's in their place; whatever comes from data is escaped by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from flowbench.errors import FlowbenchError
from flowbench.judge.verdict import Change
from flowbench.report import words

# What a user's folder may hold. `own/NAME` is the package's template of that name, to extend or to include.
TEMPLATES = ("report.md.j2", "page.html.j2", "page.css", "page.js")
# The formats that are made from them.
FORMATS = ("markdown", "html")
Escape = Callable[[str, int], str]
_LONGEST = 400
_WAY_OUT = "Jinja is not installed: python -m pip install 'flowbench[report]'"


def unavailable() -> str | None:
    """Why no template can be filled here, with the way out; None where it can."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return _WAY_OUT
    return None


class Ready(str):
    """A text that is of the template's language already: a chart, or a figure that was written by a filter."""

    def __html__(self) -> str:
        return self


class Templates:
    """The templates of one language: `escaped` turns a text from data, cut to a length, into mere text of the language.

    `overrides` maps names to texts that take the place of the package's own. FlowbenchError for one that does not work.
    """

    def __init__(self, overrides: Mapping[str, str], escaped: Escape) -> None:
        try:
            import jinja2
        except ImportError:
            raise FlowbenchError(_WAY_OUT) from None
        self._environment = _environment(tuple(sorted(overrides.items())), escaped)
        # A user's template may divide by zero or call what is no function: that is its fault, and told in one line.
        mistakes = (TypeError, ValueError, ArithmeticError, LookupError) if overrides else ()
        self._errors = (jinja2.TemplateError, *mistakes)

    def fill(self, name: str, values: Mapping[str, Any]) -> str:
        """The text of template `name` with `values`."""
        try:
            return self._environment.get_template(name).render(values)
        except self._errors as error:
            line = getattr(error, "lineno", None)
            where = f"{getattr(error, 'name', None) or name}{f', line {line}' if line else ''}"
            raise FlowbenchError(
                f"template {where}: {' '.join(str(error).split())}; own/{name} is the one that works"
            ) from None


@lru_cache(maxsize=8)
def _environment(overrides: tuple[tuple[str, str], ...], escaped: Escape) -> Any:
    """Jinja's environment, which keeps the templates that it has compiled: compiling takes longer than filling them."""
    import jinja2

    def finalize(value: Any) -> Any:
        # What has `__html__` is of the template's language already: `Ready`, and what Jinja itself escaped.
        return value if hasattr(value, "__html__") else Ready(escaped(str(value), _LONGEST))

    own = jinja2.PackageLoader("flowbench.report", "templates")
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.DictLoader(dict(overrides)), own, jinja2.PrefixLoader({"own": own})]),
        autoescape=True,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= _filters(escaped)
    return environment


def _filters(escaped: Escape) -> dict[str, Callable[..., Ready]]:
    """What templates write figures with."""

    def figure(value: float, unit: str) -> Ready:
        return Ready(words.milliseconds(value) if unit == "ms" else words.mebibytes(value))

    def change(of: Change | None) -> Ready:
        if of is None:
            return Ready("")
        return Ready(f"{of.ratio:.3f} ({words.interval(of.interval)})")

    return {
        "change": change,
        "counted": lambda number, word, plural="": Ready(words.counted(number, word, plural)),
        "figure": figure,
        "interval": lambda ends: Ready(words.interval(ends)),
        "lines": lambda text: Ready("\n".join(escaped(line, _LONGEST) for line in text.splitlines())),
        "memory_ratio": lambda ratio: Ready(words.memory_ratio(ratio)),
        "mib": lambda size: Ready(words.mebibytes(size)),
        "ms": lambda time: Ready(words.milliseconds(time)),
        # For words of this program's own, never for what comes from data.
        "plain": lambda text: Ready(str(text)),
        "ratio": lambda ratio, digits=2: Ready(f"{ratio:.{digits}f}"),
        "short": lambda text, longest: Ready(escaped(text, longest)),
        "spread": lambda ends: Ready(words.spread(*ends)),
    }
