"""The `kvferry` command. A wrong flag, file or value gives one line on standard error and exit code 2; a known error
for another reason, one line and exit code 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter, UnusedCliTokensError
from cyclopts.config import Env

from kvferry import __version__
from kvferry.cli import home
from kvferry.cli.cache.command import cache
from kvferry.cli.completion import add_completion
from kvferry.cli.demo.command import demo
from kvferry.cli.flag_sources import ConfigFile, refuse_unread
from kvferry.cli.fleet.command import app as fleet
from kvferry.cli.fleet.init import add_to as add_init_to
from kvferry.cli.fleet.recommend import add_to as add_recommend_to
from kvferry.cli.fleet.render import add_to as add_render_to
from kvferry.cli.fleet.run import add_to as add_run_to
from kvferry.cli.help import PAGES
from kvferry.cli.serving.instance import decode, prefill
from kvferry.cli.serving.picker import picker
from kvferry.cli.serving.rank import rank
from kvferry.cli.serving.router import router
from kvferry.cli.serving.serve import serve
from kvferry.core.errors import ConfigError
from kvferry.core.runtime.process_exit import EXIT_USER_ERROR, exit_code_of, exit_process, report_error
from kvferry.core.runtime.streams import EXIT_UNREAD, OutputError, prepare_streams
from kvferry.core.settings.environment import INSTANCE_NAME, VARIABLES
from kvferry.core.settings.flags import flag_name
from kvferry.fleet.spec.variables import CONFIG_VARIABLE
from kvferry.observe.logs import LogConfig, set_up_logging

_PREFIX = "KVFERRY_"

COMMANDS = ("serve", "prefill", "decode", "router", "picker", "demo")
ENVIRONMENT = Env(_PREFIX, command=False)

HELP = r"""
Serve large language models with **prefill and decode on different instances**.

A long prompt then no longer stalls other requests' answers: prefill instances compute prompts, decode instances
generate answers, and the KV cache moves from one to the other. All on one machine, behind one OpenAI endpoint:

    kvferry serve kvferry/tiny-python --prefill 1 --decode 1

    curl http://127.0.0.1:8000/v1/completions \
      -H 'Content-Type: application/json' \
      -d '{"prompt": "def add(a, b):"}'

With vLLM's servers instead of kvferry's own engine; arguments after `--` are passed to vLLM:

    kvferry serve MODEL --engine vllm --prefill 1 --decode 1 -- --dtype bfloat16

The same parts one by one, on one machine or several:

    kvferry prefill MODEL --port 8001
    kvferry decode MODEL --port 8002
    kvferry router --prefill-url http://127.0.0.1:8001 \
      --decode-url http://127.0.0.1:8002

Every flag can also be set by an environment variable (`--max-num-seqs` by `KVFERRY_MAX_NUM_SEQS`) or in a TOML file
(`--config`, tables [engine], [router], [serve]). The command line wins, then the environment, then the file.
"""

_IMPORTED_WHEN_USED = {
    "boards": "kvferry.cli.boards.command:boards",
    "ask": "kvferry.cli.client.talk:ask",
    "bench": "kvferry.cli.client.bench:bench",
    "chat": "kvferry.cli.client.talk:chat",
    "doctor": "kvferry.cli.doctor.command:doctor",
    "status": "kvferry.cli.watch.status:status",
    "top": "kvferry.cli.watch.top:top",
    **{name: f"kvferry.cli.planning.{name}:{name}" for name in ("simulate", "calibrate", "plan", "why")},
}
"""These commands are imported when they are used, so that an instance or a router does not load the simulator or the
terminal's widgets at its start."""

app = App(
    name="kvferry",
    help=HELP,
    help_formatter=PAGES,
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)
app.meta.suppress_keyboard_interrupt = False  # `main` ends the process without waiting for threads
app.meta.group_parameters = Group("Everywhere", sort_key=99)
app.command(serve, sort_key=1)
app.command(prefill, sort_key=2)
app.command(decode, sort_key=3)
app.command(router, sort_key=4)
app.command(rank, sort_key=5)
app.command(picker, sort_key=5)
app.command(demo, sort_key=6)
add_render_to(fleet)
add_run_to(fleet)
add_init_to(fleet)
add_recommend_to(fleet)
app.command(fleet)
app.command(cache)
add_completion(app)
app.command("kvferry.cli.client.record:trace", name="trace", sort_key=11)
for sort_key, (name, function) in enumerate(_IMPORTED_WHEN_USED.items(), 8):
    # Its flags would otherwise be in the group of those that all commands have.
    app.command(function, name=name, sort_key=sort_key, group_parameters=Group.create_default_parameters())


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None,
        Parameter(
            help="Read flags from a TOML file; also KVFERRY_CONFIG.", env_var=CONFIG_VARIABLE, show_env_var=False
        ),
    ] = None,
) -> int | None:
    """Find where flags come from, then run the command."""
    command, _, rest = app.parse_commands(tokens)
    if not {*app.help_flags, *app.version_flags}.intersection(rest):
        refuse_unread(command, app, has_file=config is not None)
    sources = (ENVIRONMENT,) if config is None else (ENVIRONMENT, ConfigFile(config, COMMANDS))
    app.config = (*sources, _require_whole_numbers)
    code: int | None = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    return code


def _require_whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse fractions where a flag is a whole number: cyclopts would round them, and `--prefill 1.5` would start two.

    The last of cyclopts' sources of flags. It checks the values from the command line, the environment and a file.
    Raises `ConfigError`, which names the flag or the variable.
    """
    for argument in arguments:
        kinds = set(_kinds(argument.hint))
        if int not in kinds or float in kinds:
            continue
        for token in argument.tokens:
            with suppress(ValueError):  # it is not a number: cyclopts reports this
                if "." in token.value and not float(token.value).is_integer():
                    where = token.keyword or argument.name
                    raise ConfigError(f"{where} must be a whole number, got {token.value[:40]}")


def _kinds(hint: Any) -> list[Any]:
    """The types in an annotation."""
    parts = get_args(hint)
    return [kind for part in parts for kind in _kinds(part)] if parts else [hint]


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (by default `sys.argv`). Returns the exit code."""
    set_up_logging(LogConfig())
    _warn_of_unknown_variables()
    try:
        argv = for_engine(sys.argv[1:] if arguments is None else arguments)
        if not argv:
            return home.main()
        if argv[0].startswith("-"):  # the help shows what each command does
            for name in (*_IMPORTED_WHEN_USED, "trace"):
                app[name]
        code = exit_code_of(lambda: _run(argv))
        sys.stdout.flush()  # an error of standard output must be known before the exit code is chosen
    except CycloptsError as error:
        return report_error(_misuse(error), EXIT_USER_ERROR)
    except OutputError as error:
        code = error.exit_code()
        return code if code == EXIT_UNREAD else report_error(error.strerror or str(error), code)
    return code


def _run(arguments: list[str]) -> int:
    tokens = PAGES.begin(arguments)
    code: int | None = app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    sys.stdout.write(PAGES.end(tokens))
    return code or 0


def _warn_of_unknown_variables() -> None:
    """Warn of variables that are misspelt names of kvferry's variables. The processes of a supervisor inherit its
    variables, and do not warn again. (Kubernetes sets other `KVFERRY_…` variables in pods beside a service with this
    name.)"""
    without_flag = {name.removeprefix(_PREFIX) for name in (*VARIABLES, CONFIG_VARIABLE)}
    unknown_names = {name.removeprefix(_PREFIX) for name in os.environ if name.startswith(_PREFIX)} - without_flag
    if not unknown_names or INSTANCE_NAME in os.environ:
        return
    known_names = sorted({*without_flag, *_flag_variables(app)})
    for name in sorted(unknown_names.difference(known_names)):
        if near := get_close_matches(name, known_names, n=1, cutoff=0.8):
            warning = f"nothing reads the variable {_PREFIX}{name}; did you mean {_PREFIX}{near[0]}?"
            sys.stderr.write(f"kvferry: warning: {warning}\n")


def _flag_variables(group: App) -> Iterator[str]:
    """The variables of all commands' flags, without the prefix."""
    for name in group:
        if name.startswith("-"):
            continue
        if group[name].default_command is None:
            yield from _flag_variables(group[name])
            continue
        for flag in group[name].assemble_argument_collection(parse_docstring=False):
            for spelling in flag.names:
                yield spelling.lstrip("-").replace("-", "_").upper()


def for_engine(arguments: list[str]) -> list[str]:
    """The arguments after `--`, as kvferry's flags that pass them to the engine unchanged."""
    if "--" not in arguments:
        return arguments
    index = arguments.index("--")
    return arguments[:index] + [f"{flag_name('engine_argument')}={word}" for word in arguments[index + 1 :]]


def _misuse(error: CycloptsError) -> str:
    """Message about an invalid command line, with the command that describes its flags."""
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        text = f"unexpected argument {error.unused_tokens[0]!r}"
    else:
        text = str(error)
        text = text if text.endswith("...") else text.rstrip(".")  # "...": the command has subcommands
    command = " ".join(["kvferry", *(error.command_chain or ())])
    return f"{text} See {command} --help" if text.endswith("?") else f"{text}; see {command} --help"


if __name__ == "__main__":
    prepare_streams()
    exit_process(main())
