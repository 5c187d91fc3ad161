"""The prompt of `frazil sql`: completion, history, and statements over several lines until `;`.

In: keys on a terminal. Out: statements, executed one by one; an error ends its input and not the
prompt. The history is a file that only its owner can read, and secrets in it are masked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document as TypedText
from prompt_toolkit.filters import completion_is_selected
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from frazil.cli.app import stop
from frazil.cli.sql_session import SqlSession
from frazil.errors import ConfigError, FrazilError
from frazil.render import output, show
from frazil.sql.completion import complete
from frazil.sql.definitions import LoadedDefinitions
from frazil.sql.document_builder import Objects
from frazil.sql.parser import is_open
from frazil.sql.source_text import masked
from frazil.sql.tree_reader import read_statements

_PROMPT, _CONTINUED = "frazil> ", "     -> "
_ENDS = ("exit", "quit", r"\q")
_HELP = """Statements end with `;` and may have several lines. Tab completes, arrows and Ctrl-R look
through the history, Ctrl-C drops what is typed, Ctrl-D ends. CREATE, ALTER, DROP, SHOW SINKS |
CONNECTIONS | SECRETS | VIEWS, SHOW CREATE SINK s, DESCRIBE, EXPLAIN, START, STOP, AUDIT SINK s,
VALIDATE CONNECTION c: docs/reference/sql.md"""


class MaskedHistory(FileHistory):
    """A history without secrets."""

    def store_string(self, string: str) -> None:
        super().store_string(masked(string))


class StatementCompleter(Completer):
    """The definitions are read once for each input."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session
        self._objects: Objects = {}

    def refresh(self) -> LoadedDefinitions:
        definitions = self._session.definitions()
        self._objects = definitions.objects
        return definitions

    def get_completions(self, document: TypedText, _: CompleteEvent) -> Iterator[Completion]:
        completion = complete(document.text_before_cursor, self._objects)
        for text, kind in completion.candidates:
            yield Completion(text, start_position=-completion.replaced, display_meta=kind)


def prompt(session: SqlSession) -> None:
    """Until `exit`, or the end of input."""
    completer = StatementCompleter(session)
    reader: PromptSession[str] = PromptSession(
        message=_PROMPT,
        prompt_continuation=lambda width, line, wrapped: _CONTINUED,
        completer=completer,
        history=_history(),
        key_bindings=_keys(),
        multiline=True,
        complete_while_typing=False,
    )
    print("`help` says how to use it; Ctrl-D ends")
    while True:
        try:
            completer.refresh()
            text = reader.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        word = text.strip().rstrip(";").lower()
        if word in _ENDS:
            return
        if word in ("help", "?"):
            print(_HELP)
        elif word:
            _execute(session, text)


def _execute(session: SqlSession, text: str) -> None:
    try:
        with stop.raised():
            for statement in read_statements(text, "input"):
                show(session.execute(statement), output())
    except FrazilError as error:
        print(f"frazil: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        stop.signal = 0
        print("stopped", file=sys.stderr)


def _keys() -> KeyBindings:
    """Enter ends the input where its last statement is complete; else it begins a line."""
    keys = KeyBindings()

    @keys.add("enter", filter=~completion_is_selected)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text
        word = text.strip().lower()
        if not word or word in (*_ENDS, "help", "?") or not is_open(text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    return keys


def _history() -> FileHistory:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    path = Path(state, "frazil", "sql_history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="set XDG_STATE_HOME to another folder"
        ) from None
    return MaskedHistory(str(path))
