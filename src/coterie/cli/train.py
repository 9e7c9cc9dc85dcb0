"""`coterie train RECIPE --out DIR`: prepare the text, train, evaluate, export; `train prepare RECIPE` only fetches.

The process restarts itself once with settings that glibc and libgomp read at start only: freed memory is kept, huge
pages are used (almost twice the speed), and threads wait briefly before they sleep, since spinning on a machine that
others use too makes a step several times slower.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.cli.common import FiniteRange

ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TOP_PAD_": "67108864",
    "GOMP_SPINCOUNT": "2000",
}


class _RunByDefault(click.Group):
    """A group whose first argument may be a recipe: then the verb is `run`. Without any it shows its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = args or ["--help"]
        if args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault, context_settings={"help_option_names": ["-h", "--help"]})
def train() -> None:
    """Train the small demo model from a recipe (a TOML file, or `demo`).

    coterie train demo --out runs/demo
    """


@train.command()
@click.argument("recipe")
@click.option("--data", "data_folder", required=True, type=click.Path(path_type=Path), help="Folder for the text.")
def prepare(recipe: str, data_folder: Path) -> None:
    """Fetch, split and tokenise a recipe's text into a folder."""
    from coterie.train.config import load_recipe
    from coterie.train.data import prepare as prepare_data

    console = Console(stderr=True)
    with console.status("preparing") as status:
        corpus = prepare_data(load_recipe(recipe), data_folder, _recipe_folder(recipe), status.update)
    for register in corpus.registers:
        console.print(f"{register.name:14s} {len(register.train):>10,} tokens, {len(register.held):>8,} held out")


@train.command()
@click.argument("recipe")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for checkpoints and the model.")
@click.option("--data", "data_folder", type=click.Path(path_type=Path), help="Prepared text (default: OUT/data).")
@click.option("--resume", is_flag=True, help="Continue from the checkpoint in OUT.")
@click.option("--minutes", type=FiniteRange(min=0.1), help="Plan the run to take about this long on this machine.")
@click.option("--tokens", type=click.IntRange(min=1), help="Plan the run for this many tokens instead of the recipe's.")
def run(
    recipe: str, out: Path, data_folder: Path | None, resume: bool, minutes: float | None, tokens: int | None
) -> None:
    """Train a recipe, then evaluate and export to OUT/model."""
    if minutes is not None and tokens is not None:
        raise click.UsageError("--minutes and --tokens both set the length of the run; give one")
    _restart_with_environment()
    from coterie.train import run as runner
    from coterie.train.checkpoint import has_checkpoint
    from coterie.train.config import load_recipe
    from coterie.train.data import prepare as prepare_data
    from coterie.train.trainer import Trainer

    plan = load_recipe(recipe)
    paths = runner.Paths(out)
    if has_checkpoint(paths.checkpoint) and not resume:
        raise click.UsageError(f"{out} holds a checkpoint: add --resume to continue it, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    with console.status("preparing") as status:
        corpus = prepare_data(plan, data_folder or out / "data", _recipe_folder(recipe), status.update)
    trainer = Trainer(plan, corpus, max(1, tokens // plan.schedule.tokens_per_step) if tokens else None)
    if resume and not trainer.resume(paths.checkpoint):
        console.print(f"no checkpoint in {out}: starting afresh")
    _train_with_bar(trainer, paths, minutes, console)
    with console.status("evaluating") as status:
        results = runner.finish(trainer, corpus, paths, _command_line(), status.update)
    for result in results:
        console.print(f"{result.name:14s} {result.bits_per_byte:.3f} bits per byte, MTP {result.mtp_agreement:.0%}")
    console.print(f"model: {paths.model}   try: coterie serve {paths.model}")


def _train_with_bar(trainer: object, paths: object, minutes: float | None, console: Console) -> None:
    from coterie.train.checkpoint import Point, RunState
    from coterie.train.run import Paths
    from coterie.train.run import train as run_training
    from coterie.train.trainer import Trainer

    assert isinstance(trainer, Trainer)
    assert isinstance(paths, Paths)
    per_step = trainer.recipe.schedule.tokens_per_step
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[speed]:,.0f} tok/s  loss {task.fields[loss]:.3f}  MTP {task.fields[mtp]:.3f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    state = trainer.state
    with Progress(*columns, console=console) as bar:
        total, done = state.total_steps * per_step, state.step * per_step
        task = bar.add_task("train", total=total, completed=done, speed=0.0, loss=0.0, mtp=0.0)

        def show(point: Point, now: RunState) -> None:
            recent = now.history[-20:]
            speed = len(recent) / sum(1 / p.tokens_per_second for p in recent)
            loss, mtp = (
                sum(values) / len(recent) for values in zip(*((p.loss, p.mtp_loss) for p in recent), strict=True)
            )
            bar.update(
                task, total=now.total_steps * per_step, completed=now.step * per_step, speed=speed, loss=loss, mtp=mtp
            )
            if not console.is_terminal and now.step % 50 == 0:
                console.print(
                    f"step {now.step} of {now.total_steps}: loss {loss:.4f}, MTP {mtp:.4f}, {speed:,.0f} tok/s"
                )

        run_training(trainer, paths, minutes, show)


def _recipe_folder(recipe: str) -> Path:
    return Path(recipe).resolve().parent


def _command_line() -> str:
    return " ".join(["coterie", *sys.argv[1:]])


def _restart_with_environment() -> None:
    """Start this process anew with ENVIRONMENT, unless it already runs with all of them or was imported."""
    program = Path(sys.argv[0]).parts[-2:]
    if (program[-1:] != ("coterie",) and program != ("coterie", "__main__.py")) or sys.platform != "linux":
        return
    if all(name in os.environ for name in ENVIRONMENT):
        return
    os.execve(sys.executable, [sys.executable, "-m", "coterie", *sys.argv[1:]], {**ENVIRONMENT, **os.environ})
