"""A user's function in the place of a part of training, by its reference in the recipe. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from millrace.data.functions import FunctionError, explain, imported
from millrace.errors import SetupError


class PluginError(RuntimeError):
    """A plug-in failed in a call; the message has its setting and name, the reason, and what to change."""


@dataclass(frozen=True, slots=True, eq=False)
class Plugin:
    """A function, and the inputs that its parameters name.

    Attributes:
        title: the setting and the reference, such as `policy.loss my_losses:smooth`, for messages.
        function: of the user.
        names: the inputs that it takes.
        options: further arguments.
    """

    title: str
    function: Callable[..., Any]
    names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        setting: str,
        reference: str,
        inputs: Sequence[str],
        options: Mapping[str, Any] | None = None,
        *,
        needs_one: bool = True,
    ) -> Plugin:
        """Import a function, and check that it can be called.

        Args:
            setting: that names it, for messages.
            reference: `module:function` or `path/to/file.py:function`.
            inputs: names of all inputs; the function gets those that its parameters name.
            options: further arguments by name.
            needs_one: whether a function that takes none of the inputs is a mistake.

        Raises:
            SetupError: there is no such function, or it has a parameter that is none of these.
        """
        title = f"{setting} {reference}"
        try:
            function = imported(reference)
        except FunctionError as error:
            raise SetupError(f"{title}: {error}") from error
        names = input_names(function, inputs, title=title, options=options or {})
        if inputs and needs_one and not names:
            raise SetupError(f"{title} takes none of its inputs; give it some of {', '.join(inputs)}")
        return cls(title, function, names, dict(options or {}))

    def __call__(self, **inputs: Any) -> Any:
        """Call the function with the inputs that it takes; PluginError if it raises."""
        with self.called():
            return self.function(**{name: inputs[name] for name in self.names}, **self.options)

    def make(self, **inputs: Any) -> Any:
        """Call the function at the start of a run; SetupError if it raises."""
        try:
            return self(**inputs)
        except PluginError as error:
            raise SetupError(str(error)) from error

    @contextmanager
    def called(self, where: str = "") -> Iterator[None]:
        """Turn what the user's code raises within into a PluginError; `where` is the part that was called."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise PluginError(f"{self.title} raised {explain(error)}{where}; correct it") from error

    def refuse(self, why: str) -> PluginError:
        """Return the error of a result that cannot be used; `why` continues the sentence after its name."""
        return PluginError(f"{self.title} {why}")


def input_names(
    function: Callable[..., Any], inputs: Sequence[str], *, title: str, options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the inputs that a function's parameters name; all of them if it takes `**others`.

    Raises:
        SetupError: it is asynchronous, or a parameter is neither an input nor an option nor has a default, or
            an option is no parameter.
    """
    if inspect.iscoroutinefunction(function):
        raise SetupError(f"{title} is an async def, and its result is needed at once; make it a def")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise SetupError(f"{title} has no signature that can be read; name a Python function") from None
    there = ", ".join(inputs) or "no inputs"
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = {
        each.name
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    for each in parameters.values():
        needed = each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if needed and (
            each.kind is each.POSITIONAL_ONLY or not (each.name in inputs or each.name in options)
        ):
            raise SetupError(
                f"{title} has a parameter {each.name}, and inputs are passed by name: {there}; rename it, "
                "or give it a default"
            )
    for name in options:
        if name in inputs or not (takes_all or name in known):
            why = "is an input" if name in inputs else "is no parameter of it"
            raise SetupError(f"{title} has the option {name}, which {why}; rename or remove it")
    return tuple(name for name in inputs if takes_all or name in known)
