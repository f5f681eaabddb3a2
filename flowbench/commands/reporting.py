"""What `flowbench report` does: reads run documents and a user's templates, writes a report where it was asked for."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from flowbench.archive.folder import Archive
from flowbench.commands.noise import sure_floors
from flowbench.errors import FlowbenchError
from flowbench.judge.compare import judge_document
from flowbench.judge.documents import judge_documents
from flowbench.judge.series import Series
from flowbench.judge.verdict import ComparisonSet
from flowbench.record import store
from flowbench.record.document import read_document
from flowbench.record.noise import noise_path, read_floors
from flowbench.record.run import RunDocument
from flowbench.report import BINARY, render, render_bytes
from flowbench.report.style import SPECIAL, Style
from flowbench.report.templating import TEMPLATES


def report(
    document: Path,
    base: Path | None,
    form: str,
    templates: Path | None,
    store_folder: Path | None,
    output: Path | None,
) -> str | None:
    """The text to print, None where it was written to `output`; FlowbenchError for what cannot be read or written.

    `base` is a run document to compare with. `store_folder` is a store of runs, whose history of the document's cells the
    HTML page shows.
    """
    if output is not None:
        _check_apart(output, _inputs(document, base, templates, store_folder))
    read = read_document(document)
    comparison = _comparison(read, document, base)
    history = read_history(store_folder) if store_folder else ()
    overrides = read_templates(templates) if templates else {}
    if output is not None:
        _write(
            output, render_bytes(read, form, comparison=comparison, history=history, style=Style(templates=overrides))
        )
        return None
    if form in BINARY:
        raise FlowbenchError(f"{form} is no text for a terminal: name a file for it with -o FILE")
    return render(
        read,
        form,
        comparison=comparison,
        history=history,
        style=dataclasses.replace(terminal_style(), templates=overrides),
    )


def terminal_style() -> Style:
    """What standard output can show: colours on a terminal where NO_COLOR is not set, more than ASCII where it encodes it."""
    stream = sys.stdout
    if stream is None:
        return Style()
    colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    try:
        SPECIAL.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Style(colour=colour, ascii_only=True)
    return Style(colour=colour)


def read_templates(folder: Path) -> dict[str, str]:
    """The templates in `folder` by their names; FlowbenchError where it has none that a report is made from."""
    try:
        paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    except OSError as error:
        raise FlowbenchError(f"{folder}: {error.strerror or error}, expected a folder of templates") from None
    if not {path.name for path in paths} & set(TEMPLATES):
        raise FlowbenchError(
            f"{folder} has none of the templates {', '.join(TEMPLATES)}: name yours like the one it replaces"
        )
    return {path.name: _template(path) for path in paths}


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FlowbenchError(f"{path}: {error.strerror or error}, expected a readable template") from None
    except UnicodeDecodeError as error:
        raise FlowbenchError(f"{path}: not UTF-8 text (byte {error.start}), expected a template") from None


def read_history(folder: Path) -> tuple[Series, ...]:
    """The series of the store at `folder`; FlowbenchError where there is no such folder."""
    from flowbench import history

    if not folder.is_dir():
        raise FlowbenchError(f"{folder}: no such folder, expected a store of runs (flowbench store add DOCUMENT…)")
    return history.read(folder)


def _comparison(document: RunDocument, path: Path, base: Path | None) -> ComparisonSet | None:
    """The verdicts against `base`, or those of a sitting that has both sides; None where there is nothing to compare."""
    if base is None:
        return judge_document(document) if document.comparison is not None else None
    other = read_document(base)
    for place, one in ((base, other), (path, document)):
        if one.comparison is not None:
            raise FlowbenchError(
                f"{place} is a sitting of two sides already, expected ordinary runs to compare: leave the base out"
            )
    return judge_documents(other, document, noise_floors=sure_floors(read_floors(other.machine)))


def _inputs(document: Path, base: Path | None, templates: Path | None, store_folder: Path | None) -> Iterator[Path]:
    """The files that a report is made from."""
    yield document
    if base is not None:
        yield from (base, noise_path())
    if templates is not None and templates.is_dir():
        yield from templates.iterdir()
    if store_folder is not None:
        yield from Archive(store_folder).files()


def _check_apart(output: Path, inputs: Iterator[Path]) -> None:
    """FlowbenchError where the report would take the place of a file that it is made from."""
    if not output.is_file():  # also a terminal, which may be read from and written to
        return
    for path in inputs:
        if store.is_same_file(output, path):
            read = "is read for the report" if output == path else f"is {path}, which is read for the report"
            raise FlowbenchError(f"{output} {read} and would be lost: choose another file with --out")


def _write(output: Path, content: bytes) -> None:
    if output.exists() and not output.is_file():  # a device or a pipe, which must not be replaced by a file
        try:
            output.write_bytes(content)
        except OSError as error:
            raise FlowbenchError(
                f"cannot write {output}: {error.strerror or error}; choose another file with --out"
            ) from None
    else:
        # What a link leads to, for the link may be the system's own: /dev/stdout is one.
        store.write_whole(store.followed(output), content)
