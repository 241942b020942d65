"""The command line: the only place that reads arguments and the environment."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from elastic_refit.errors import ConfigError, ElasticRefitError, MembershipError

__all__ = ["main"]

_INTERRUPTED = 130
_PLAIN_WIDTH = 120
_BENCHES = {
    "broadcast": "elastic_refit.actors.bench",  # one of its rivals needs Ray
    "communicators": "elastic_refit.bench.communicators",
    "ledger": "elastic_refit.bench.ledger",
    "vllm": "elastic_refit.demo.fleet_bench",
}
_OFF = ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_DEDUP_LOGS", "RAY_ENABLE_AUTO_CONNECT")
"""Settings of Ray. With the last one, a thread that calls Ray when it is shut down would start another cluster."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="elastic-refit")
def cli() -> None:
    """Reinforcement-learning post-training that survives the loss of generation shards during a weight refit."""


@cli.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="YAML file; default: the demo's own.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. refit.bucket_bytes=65536."
)
@click.option("--steps", type=int, help="Training steps; each ends with a refit.")
@click.option("--shards", type=int, help="Generation shards.")
@click.option("--trainers", type=int, help="Trainer ranks.")
@click.option("--engine", type=click.Choice(["vllm", "torch"]), help="What generates.")
@click.option("--seed", type=int, help="Seed of the model, the prompts and the sampling.")
@click.option("--kill", "kills", multiple=True, metavar="SHARD@STEP:PHASE", help="SIGKILL a shard, e.g. 0@3:bucket:2.")
@click.option("--freeze", "freezes", multiple=True, metavar="SHARD@STEP:PHASE", help="SIGSTOP a shard.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
def demo(
    path: Path | None, overrides: tuple[str, ...], kills: tuple[str, ...], freezes: tuple[str, ...], **rest: Any
) -> None:
    """Run a small RL loop on this machine, with shards that are killed in the middle of a refit."""
    from elastic_refit.chaos import parse_fault

    faults = [parse_fault("kill", text) for text in kills] + [parse_fault("freeze", text) for text in freezes]
    json_path = rest.pop("json_path")
    keys = {
        "steps": "demo.steps",
        "seed": "demo.seed",
        "shards": "fleet.shards",
        "trainers": "fleet.trainers",
        "engine": "engine.kind",
    }
    chosen = [f"{keys[name]}={value}" for name, value in rest.items() if value is not None]
    if faults:
        chosen.append("chaos.enabled=true")
    if rest["engine"] is not None:
        chosen.insert(0, "engine.options={}")  # the file's options are those of the file's engine
    config = _demo_config(path, [*chosen, *overrides])

    from rich.console import Console

    from elastic_refit.demo.main import run_demo

    out = sys.stdout
    console = Console(file=out, width=None if out.isatty() else _PLAIN_WIDTH)
    sys.exit(run_demo(config, faults, console, json_path))


@cli.command()
@click.option("--file", "path", type=click.Path(path_type=Path), help="YAML file of cells; default: the project's own.")
@click.option("--cell", "ids", multiple=True, metavar="ID", help="Run these only, e.g. 'kill-*'; may be repeated.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here.")
@click.option("--grid", "grid_path", type=click.Path(path_type=Path, dir_okay=False), help="Draw it: .svg or .png.")
@click.option("--engine", type=click.Choice(["vllm", "torch"]), help="Only cells of this engine.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Fleets beside each other.")
@click.option("--random", "count", type=int, help="Draw this many cells instead of reading any.")
@click.option("--seed", type=int, help="Seed of --random; default: a new one, which is printed.")
def matrix(
    path: Path | None,
    ids: tuple[str, ...],
    count: int | None,
    seed: int | None,
    *,
    engine: str | None,
    **rest: Any,
) -> None:
    """Kill, freeze and disturb members of real fleets in every phase of a refit, and check what follows."""
    from rich.console import Console

    from elastic_refit.matrix.cells import choose_cells, load_cells
    from elastic_refit.matrix.draw import draw_cells, fresh_seed
    from elastic_refit.matrix.main import Asked, run_matrix

    out = sys.stdout
    console = Console(file=out, width=None if out.isatty() else _PLAIN_WIDTH)
    if count is not None:
        if path is not None or ids or engine is not None:
            raise ConfigError("--random draws its cells: it goes without --file, --cell and --engine", field="random")
        seed = fresh_seed() if seed is None else seed
        console.print(f"repeat with --random {count} --seed {seed}", highlight=False)
        cells = draw_cells(count, seed)
    else:
        if seed is not None:
            raise ConfigError("--seed: belongs to --random", field="seed")
        cells = choose_cells(load_cells(path or _own_config("matrix.yaml")), ids, engine=engine)
    sys.exit(run_matrix(cells, Asked(seed=seed, ray_address=os.environ.get("RAY_ADDRESS"), **rest), console))


@cli.command()
@click.option("--trainers", type=int, required=True, help="Trainer ranks.")
@click.option("--widths", required=True, metavar="W,W,…", help="Ranks of each shard, by shard index.")
@click.option("--absent", default="", metavar="I,I,…", help="Shard indices that are lost.")
@click.option("--json", "as_json", is_flag=True, help="Print {before, after}: world size, first rank by shard.")
def plan(trainers: int, widths: str, absent: str, as_json: bool) -> None:
    """Show which ranks everybody holds, before and after the loss of shards."""
    from elastic_refit.plan_view import describe_plan, draw_plan, plan_loss

    try:
        before, after = plan_loss(trainers, _numbers("--widths", widths), _numbers("--absent", absent))
    except (ValueError, MembershipError) as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{kind}{error}") from None
    click.echo(json.dumps(describe_plan(before, after)) if as_json else draw_plan(before, after))


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is no list of whole numbers, such as 1,1,2") from None


@cli.command()
@click.argument("kind", type=click.Choice(["run", "demo"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a config file."""
    from elastic_refit.config import RunConfig, export_schema
    from elastic_refit.demo.config import DemoConfig

    click.echo(json.dumps(export_schema(DemoConfig if kind == "demo" else RunConfig), indent=2))


@cli.command()
@click.argument("what", type=click.Choice(sorted(_BENCHES)))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(what: str, as_json: bool) -> None:
    """Measure a part on this machine; ratios in one run are what counts."""
    from importlib import import_module

    figures = import_module(_BENCHES[what]).measure()
    click.echo(json.dumps(figures) if as_json else json.dumps(figures, indent=2))


def _demo_config(path: Path | None, overrides: list[str]) -> Any:
    from elastic_refit.config import load_config
    from elastic_refit.demo.config import DemoConfig

    given = path if path is not None else _own_config("demo.yaml")
    address = os.environ.get("RAY_ADDRESS")
    if address and not any(override.startswith("ray.address=") for override in overrides):
        overrides = [f"ray.address={address}", *overrides]
    return load_config(given, overrides, model=DemoConfig)


def _own_config(name: str) -> Path:
    """The file that lies beside the package in a checkout, or inside it when installed."""
    here = Path(__file__).parent
    beside = here.parent / "configs" / name
    return beside if beside.is_file() else here / "configs" / name


def main() -> None:
    """Entry point: every mistake of the user is one sentence and exit code 2."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for name in _OFF:
        os.environ.setdefault(name, "0")
    try:
        cli(standalone_mode=False)
    except ConfigError as error:
        click.echo(f"elastic-refit: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("elastic-refit: interrupted; nothing was left running", err=True)
        sys.exit(_INTERRUPTED)
    except ElasticRefitError as error:
        click.echo(f"elastic-refit: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
