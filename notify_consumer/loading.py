"""Finding the handlers that a user names on the command line."""

from __future__ import annotations

import importlib
import os
import sys

from notify_consumer.errors import BadSetting
from notify_consumer.handlers import Handlers

DEFAULT_ATTRIBUTE = "handlers"


def load_handlers(place: str) -> Handlers:
    """The Handlers at ``MODULE[:ATTRIBUTE]``; modules in the working folder are found too. Raises BadSetting."""
    name, _, attribute = place.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    module = _import(name)
    found = getattr(module, attribute or DEFAULT_ATTRIBUTE, None)
    if not isinstance(found, Handlers):
        raise BadSetting(f"--handlers: {name}.{attribute or DEFAULT_ATTRIBUTE} is not a notify_consumer.Handlers")
    if not len(found):
        raise BadSetting(f"--handlers: nothing is registered in {name}.{attribute or DEFAULT_ATTRIBUTE}")
    return found


def _import(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadSetting(f"--handlers: there is no module {name}") from None
        raise BadSetting(f"--handlers: {name} can't be imported: {error}") from error
    except Exception as error:
        raise BadSetting(f"--handlers: {name} can't be imported: {type(error).__name__}: {error}") from error
