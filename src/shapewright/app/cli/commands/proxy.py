"""shapewright proxy: train small models of given shapes on text."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.commands.bench import DEFAULT_STORE
from shapewright.app.cli.console import echo, given_command, is_shown, print_output
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.param_types import BUDGET

if TYPE_CHECKING:
    from shapewright.measure.proxy.runs import ProxySpec
    from shapewright.measure.proxy.train import Progress

_SHOW_EVERY_S = 1.0
_EPILOG = """\b
RUNS is a csv file with a header, or a jsonl file; each line is one model:
  name,hidden_size,num_layers,num_heads,num_kv_heads,intermediate_size,tokens_per_parameter
  deep,128,8,4,2,352,20
  wide,256,2,8,4,704,20
Columns: fields of a model (config: a preset or config.json to start from; else a decoder of the Llama family),
train_tokens (such as 20m) or tokens_per_parameter (default 20), seq_len (256), batch_tokens (2048), micro_batch_size
(the batch), learning_rate (0.001, for fan-in 256), warmup_fraction, final_fraction, weight_decay.

\b
Examples:
  shapewright proxy runs.csv --text book.txt --cpu --seeds 2 --store proxy.sqlite
  shapewright proxy runs.csv --text book.txt --text ./manuals --budget 8h --store proxy.sqlite
  shapewright proxy runs.csv --text book.txt --cpu --json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("runs_path", metavar="RUNS")
@click.option(
    "--text", "text_paths", metavar="FILE", multiple=True, required=True,
    help="text to train on, a file or folder; repeat for more. Tokens are its bytes",
)  # fmt: skip
@click.option(
    "--seeds", "num_seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="seeds per model"
)
@click.option("--store", "store_path", default=DEFAULT_STORE, show_default=True, metavar="PATH", help="store file")
@click.option("--cpu", is_flag=True, help="train on the CPU")
@click.option("--device-index", type=int, default=0, show_default=True, help="which of the visible GPUs")
@click.option(
    "--dtype", type=click.Choice(("fp32", "bf16")), help="format of the GEMMs (default: bf16 on GPUs that have it)"
)
@click.option("--compile", "compiles", is_flag=True, help="compile each model with torch.compile")
@click.option("--budget", type=BUDGET, help="stop after this time; the same command resumes (default: no limit)")
@click.option("--retry-failed", is_flag=True, help="train models again whose training failed")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    runs_path: str,
    text_paths: tuple[str, ...],
    num_seeds: int,
    store_path: str,
    dtype: str | None,
    budget: float | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Train the small models of RUNS on text, and store their loss and time per step.

    AdamW, learning rate scaled by 1 / fan-in, cosine schedule, the same text in the same order for all models. Every
    recorded loss goes into the store at once, and checkpoints into a folder beside it: the same command resumes what
    was stopped or killed, with the same results. 'shapewright calibrate --losses' reads the losses back. Exit code 1: a
    model diverged or did not fit into memory. Needs the bench extra (PyTorch).
    """
    from shapewright.app.report.outputs.loss import proxy_output
    from shapewright.app.report.proxies import print_proxies
    from shapewright.measure.proxy.run import ProxyRequest, train_proxies
    from shapewright.measure.proxy.runs import read_runs
    from shapewright.measure.proxy.text import read_text

    specs = read_runs(runs_path)
    request = ProxyRequest(
        specs=specs,
        text=read_text(text_paths),
        num_seeds=num_seeds,
        dtype=dtype or "",
        budget_s=budget or float("inf"),
        command=given_command(),
        on_step=_ProgressLine(len(specs) * num_seeds),
        **given,
    )
    try:
        outcome = train_proxies(request, store_path)
        if is_shown(sys.stderr):
            click.echo("\r\033[K", nl=False, err=True)
    except KeyboardInterrupt:
        echo(f"every recorded loss is in {store_path}; the same command goes on from there", err=True)
        raise
    output = proxy_output(outcome, request.text, store_path)
    print_output(output, print_proxies, as_json=as_json)
    return 1 if any(run.state == "failed" for run in output.runs) else 0


class _ProgressLine:
    """Progress on standard error: one changing line on a terminal, one line per tenth of a run elsewhere."""

    def __init__(self, num_models: int) -> None:
        self._num_models = num_models
        self._seen: list[tuple[str, int]] = []
        self._shown_s = 0.0

    def __call__(self, spec: ProxySpec, seed: int, progress: Progress) -> None:
        """Show a step."""
        name = spec.name
        if (name, seed) not in self._seen:
            self._seen.append((name, seed))
        is_terminal = is_shown(sys.stderr)
        is_due = (
            time.monotonic() - self._shown_s > _SHOW_EVERY_S
            if is_terminal
            else _is_tenth(progress.step, spec.num_steps)
        )
        if not is_due:
            return
        self._shown_s = time.monotonic()
        words = (
            f"proxy {len(self._seen)}/{self._num_models} {name} seed {seed}: step {progress.step:,} of "
            f"{spec.num_steps:,}, loss {progress.train_loss_nats:.3f}, {progress.step_s * 1e3:.3g} ms per step"
        )
        click.echo(f"\r{words}\033[K" if is_terminal else words, nl=not is_terminal, err=True)


def _is_tenth(step: int, num_steps: int) -> bool:
    return step * 10 // num_steps > (step - 1) * 10 // num_steps
