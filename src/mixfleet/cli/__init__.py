"""The command line: thin verbs over the Python API.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 does not fit or the run
failed, 2 bad input, 130 interrupted. The command modules import nothing but click until they run: `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from mixfleet.cli.calibrate import calibrate
from mixfleet.cli.compare import compare
from mixfleet.cli.discover import discover
from mixfleet.cli.elastic import elastic
from mixfleet.cli.export import export
from mixfleet.cli.fit import fit
from mixfleet.cli.plan import plan
from mixfleet.cli.predict import predict
from mixfleet.cli.scale import scale
from mixfleet.cli.schedules import schedules
from mixfleet.cli.show import show
from mixfleet.cli.testbed import testbed
from mixfleet.cli.train import train
from mixfleet.cli.validate import validate
from mixfleet.errors import InputError, RunError

_EXTRAS = {"torch": "run", "safetensors": "run", "psutil": "run", "pynvml": "gpu", "catboost": "fit", "pandas": "fit",
           "pyarrow": "fit"}


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"mixfleet {version('mixfleet')}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print it.")
def cli() -> None:
    """Predict, plan and run deep-learning training on mixed accelerators.

    \b
    mixfleet discover -o here.yaml                  describe this machine
    mixfleet plan job.yaml here.yaml -o plan.yaml   find the best plan, and say why
    mixfleet predict plan.yaml                      step time, memory and cost of any plan
    mixfleet train plan.yaml --out run --trace      train by it
    mixfleet compare run                            where was the prediction wrong?
    mixfleet validate gemm.parquet                  how far are kernel predictions from measured times?
    """


for _command in (discover, show, fit, schedules, predict, plan, scale, train, elastic, compare, export, validate,
                 calibrate, testbed):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. No traceback reaches the user unless MIXFLEET_DEBUG=1 is set."""
    try:
        code = cli.main(args=arguments, prog_name="mixfleet", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx:
            click.echo(error.ctx.get_usage(), err=True)
        return _fail(error.format_message(), 2)
    except InputError as error:
        return _fail(str(error), 2)
    except RunError as error:
        return _fail(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at exit
        return 0
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            return _bug(error)
        return _fail(f"this needs {error.name}, which is not installed; run: pip install 'mixfleet[{extra}]'", 2)
    except Exception as error:
        return _bug(error)


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code


def _bug(error: Exception) -> int:
    if os.environ.get("MIXFLEET_DEBUG") == "1":
        raise error
    return _fail(f"unexpected {type(error).__name__}: {error}\nThis is a fault of mixfleet, not yours. Please report "
                 "it with the command and its files; MIXFLEET_DEBUG=1 shows the traceback.", 1)
