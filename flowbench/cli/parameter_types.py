"""What the command line reads beyond click's own kinds of values: shapes, seconds, shares, and several values at once."""

from __future__ import annotations

import math
import re
from typing import Any

import click


class ManyValues(click.Command):
    """A command whose repeatable options also take several values, `--batch-size 4 2 1`: arguments come before them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        many = {name for p in self.params if isinstance(p, click.Option) and p.multiple for name in p.opts}
        spread: list[str] = []
        option = None
        for position, word in enumerate(args):
            if word.startswith("-"):
                option = word if word in many else None
            elif option is not None and position > 0 and args[position - 1] != option:
                spread.append(option)
            spread.append(word)
        try:
            return super().parse_args(ctx, spread)
        except click.BadParameter as error:
            arguments = [p.human_readable_name for p in self.params if isinstance(p, click.Argument)]
            if not (arguments and isinstance(error.param, click.Option) and error.param.multiple):
                raise
            option = max(error.param.opts, key=len)
            said = f"{error.message} All that follows {option} is taken for it: {' and '.join(arguments)} come before."
            raise click.BadParameter(said, error.ctx, error.param, error.param_hint) from None


COUNT = click.IntRange(min=1, max=1_000_000)


class ImageShape(click.ParamType):
    """CxHxW."""

    name = "CxHxW"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,9})[x×,](\d{1,9})[x×,](\d{1,9})", value.strip())
        shape = tuple(map(int, match.groups())) if match else ()
        if not shape or 0 in shape:
            self.fail(f"{value!r} is not three whole numbers from 1, expected CxHxW, for example 3x224x224", param, ctx)
        return shape


class Pattern(click.ParamType):
    """A part of a name, or a pattern of one; an empty one, such as a variable that is not set, would fit everything."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.strip():
            self.fail(f"{value!r} fits everything, expected a part of a name, or * for all", param, ctx)
        return value


class Repository(click.ParamType):
    """A repository of GitHub's, by its owner and its name."""

    name = "OWNER/NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", value) is None:
            self.fail(f"{value!r} is no repository of GitHub's, expected OWNER/NAME", param, ctx)
        return value


class Seconds(click.ParamType):
    """A finite time above 0."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = _number(value)
        if not 0 < seconds < 1e9:
            self.fail(f"{value!r} is no number of seconds, expected more than 0", param, ctx)
        return seconds


class Days(click.ParamType):
    """A number of days from 0; what is no number is refused, which click's own range lets through."""

    name = "days"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        days = _number(value)
        if not 0 <= days <= 36_500:
            self.fail(f"{value!r} is no number of days, expected 0 to 36500", param, ctx)
        return days


class Bytes(click.ParamType):
    """A size of at least a byte, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = re.fullmatch(r"(\d{1,15})\s*(B|KiB|MiB|GiB)?", str(value).strip())
        unit = {None: 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[match[2]] if match else 0
        size = int(match[1]) << unit if match else 0
        if not 0 < size < 2**53:
            self.fail(f"{value!r} is no size, expected bytes, KiB, MiB or GiB, for example 8GiB", param, ctx)
        return size


class Percent(click.ParamType):
    """A slowdown: `3%` or `0.03`, as a fraction."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, float):
            return value
        fraction = _number(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        if not 0 < fraction <= 1:
            self.fail(f"{value!r} is no slowdown, expected a share such as 3% or 0.03, at most 100%", param, ctx)
        return fraction


def _number(text: Any) -> float:
    """The number that `text` is; nan, which lies in no range, where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
