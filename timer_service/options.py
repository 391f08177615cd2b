"""Command-line options made from a settings model, so that flags, environment and checks have one source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
import typer.core
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from timer_service.urls import shown_url

S = TypeVar("S", bound=BaseSettings)


class WholeHelp(typer.core.TyperCommand):
    """Help without a table, whose columns cut off names of flags and variables in a narrow terminal or a pipe."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)


def settings_command(
    model: type[S],
    run: Callable[..., Any],
    *,
    only: tuple[str, ...] | None = None,
    flags: dict[str, tuple[str, ...]] | None = None,
) -> Callable[..., Any]:
    """A typer command with an option for each field of ``model`` (or those in ``only``), which calls ``run(settings)``.

    A value that is not given comes from the environment, else it is the default. What is invalid ends the
    process with code 2 and one line per mistake.
    """
    names = [name for name in model.model_fields if only is None or name in only]

    def command(**given: Any) -> Any:
        values = {name: given.pop(name) for name in names}
        return run(load_settings(model, values), **given)

    options = [_option(model, name, (flags or {}).get(name)) for name in names]
    others = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.name != "settings"]
    command.__signature__ = inspect.Signature([*others, *options])  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    return command


def load_settings(model: type[S], given: dict[str, Any]) -> S:
    """The settings from flags (None: not given) and environment. Ends the process when they are invalid."""
    try:
        return model(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        fields = {env_name(model, name): name for name in model.model_fields}
        for mistake in error.errors():
            place = str(mistake["loc"][0])  # the field, or its own name in the environment
            name = fields.get(place, place)
            flag = "--" + name.replace("_", "-")
            text = mistake["msg"].removeprefix("Value error, ")
            typer.echo(f"{flag} ({env_name(model, name)}): {text}; got {_given(mistake['input'])!r}", err=True)
        raise typer.Exit(2) from None


def env_name(model: type[BaseSettings], name: str) -> str:
    """The environment variable of a field: its own name for it, else the model's prefix and the field's name."""
    alias = model.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"{model.model_config.get('env_prefix', '')}{name.upper()}"


def _option(model: type[BaseSettings], name: str, flags: tuple[str, ...] | None) -> inspect.Parameter:
    field = model.model_fields[name]
    default = "none" if field.default is None else _shown(field.default)
    text = f"{field.description} [{env_name(model, name)}; default: {default}]"
    kind: Any = bool | None if field.annotation is bool else str | None
    spelled = flags or ("--" + name.replace("_", "-"),)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, typer.Option(*spelled, help=text, show_default=False)],
    )


def _given(value: object) -> object:
    """What was given, as it may be shown."""
    return shown_url(value) if isinstance(value, str) else value


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
