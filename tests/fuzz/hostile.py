"""Hostile inputs: grammars of files that people have, and damages of them; what using one must never do."""

from __future__ import annotations

import copy
import json
import math
import re
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from calibration_files import H100, write_late_calibration
from measured_tables import gemm_columns, write_parquet
from shapewright.app.formats import FORMATS, parse_job, read_job, write_format
from shapewright.core.errors import ShapewrightError
from shapewright.hardware import list_devices, load_device
from shapewright.hardware.loader import read_device_file, read_device_text
from shapewright.lowering.operations import Gemm
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK, Case, Row, Run, row_facts
from shapewright.models import count_parameters, list_presets, load_preset, read_model
from shapewright.models.families import FAMILIES
from shapewright.optimize.serving.traffic.trace import read_trace as read_requests
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import Prediction
from shapewright.prediction.utilization import read_trace as read_kernels
from shapewright.pricing.calibration.file import calibrated_device

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 31, 64, 257, 4096, 4097, 65_537, 2**31, 2**40, 2**40 + 1, 2**63, 10**18,
    -(10**18), 10**300, 10**400, 0.5, -0.0, 1e-308, 1e308, math.inf, -math.inf, math.nan, "", "8", "4096", "x", "gelu",
    "llama", "full_attention", "\ud800", "\x1b[31m", "\u202e", "\0", "../../etc/passwd", "{{7*7}}", [], [[]], {}, [0],
    [1, 2, 3], [0] * 300, ["full_attention"] * 8, {"": 0}, {"rope_type": "x"}, "9" * 5000,
)  # fmt: skip
SAME_TYPE: tuple[Any, ...] = (1, 2, 3, 5, 8, 16, 24, 31, 96, 128, 1000, 4096, 12_288, 50_257)
TEXTS = (
    b"", b"\0", b"\xff\xfe", b"[" * 3000, b"{\"a\":" * 3000, b"9" * 400, b"nan", b"1e999", b"-1", b"\n\n", b"'''",
    b"&a *a", b"!!python/object/apply:os.system [id]", b"__import__('os')", b"$(id)", b"%s%n", b"\\", b"=",
    b"0x10", b"1_0", b"0", b"0.5", b"null", b"true", b"[1, 2]", b"{a: 1}",
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One kind of hostile file.

    Attributes:
        suffix: End of the file's name.
        make: Returns the content of a file.
        use: Reads a file and uses what it holds; an AssertionError means that an answer is wrong.
    """

    suffix: str
    make: Callable[[Random], bytes]
    use: Callable[[Path, Random], None]


def spoil_object(content: Any, chance: Random, others: list[Any]) -> Any:
    """Replace, drop, borrow or nest some values of nested objects and lists."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        inner = content
        while True:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            if not keys:
                break
            key = chance.choice(list(keys))
            if isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.8:
                inner = inner[key]
                continue
            way = chance.random()
            if way < 0.2:
                del inner[key]
            elif way < 0.5 and isinstance(inner[key], int):
                inner[key] = chance.choice(SAME_TYPE)
            elif way < 0.6 and isinstance(inner, dict):
                other = chance.choice(others)
                borrowed = chance.choice(sorted(other))
                inner[borrowed] = copy.deepcopy(other[borrowed])
            elif way < 0.65:
                inner[key] = {"text_config": inner[key]}
            else:
                inner[key] = copy.deepcopy(chance.choice(VALUES))
            break
    return content


def spoil_bytes(content: bytes, chance: Random) -> bytes:
    """Cut, flip, insert, repeat or drop some of a file."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(content) + 1)
        other = chance.randrange(len(content) + 1)
        start, stop = min(place, other), max(place, other)
        way = chance.randrange(9)
        numbers = list(re.finditer(rb"\b\d+\b", content)) if way > 6 else []
        if numbers:
            start, stop = chance.choice(numbers).span()
            content = content[:start] + chance.choice((*TEXTS, b"1", b"7", b"4096")) + content[stop:]
        elif way == 0:
            content = content[:place]
        elif way == 1:
            content = content[:place] + chance.choice(TEXTS) + content[place:]
        elif way == 2:
            content = content[:start] + content[min(stop, start + 40) :]
        elif way == 3:
            content = content[:stop] + content[start : start + 200] + content[stop:]
        elif way == 4 and content:
            flipped = bytearray(content)
            flipped[place % len(content)] ^= 1 << chance.randrange(8)
            content = bytes(flipped)
        else:
            lines = content.split(b"\n")
            line = chance.randrange(len(lines))
            words = lines[line].split(b" ")
            words[chance.randrange(len(words))] = chance.choice((*TEXTS, str(chance.choice(SAME_TYPE)).encode()))
            lines[line] = b" ".join(words)
            content = b"\n".join(lines)
    return content


@cache
def known_configs() -> list[dict[str, Any]]:
    """Configs of the presets, and of every known type with the values of transformers."""
    found = [dict(load_preset(name).config) for name in list_presets()]
    found += [{"model_type": name, **family.defaults} for name, family in FAMILIES.items()]
    return [each for each in found if each]


def as_json(content: Any) -> bytes:
    """Text of an object; halves of surrogate pairs stay escaped."""
    return json.dumps(content).encode()


def make_config(chance: Random) -> bytes:
    """A config.json of a real type with spoilt values, or with a spoilt text."""
    content = as_json(spoil_object(chance.choice(known_configs()), chance, known_configs()))
    return spoil_bytes(content, chance) if chance.random() < 0.1 else content


def check_prediction(found: Prediction) -> None:
    """A step is finite, inside its interval, and not faster than the data sheet allows."""
    times = (found.step_time_low_s, found.step_time_s, found.step_time_high_s)
    assert all(math.isfinite(each) for each in times)
    assert 0.0 < times[0] <= times[1] <= times[2]
    assert math.isfinite(found.memory.total_bytes)
    assert found.memory.total_bytes > 0.0
    floor_s = 0.0
    for entry in found.operations:
        assert entry.price.time_s >= entry.price.roofline_s * (1.0 - 1e-12)
        if entry.operation.stage == "every" and entry.operation.pass_name != "step":
            floor_s += float(entry.price.roofline_s) * int(entry.operation.repeats) * entry.exposed_fraction
    assert times[1] >= floor_s * (1.0 - 1e-9)


def use_config(path: Path, chance: Random) -> None:
    """Read a model, count it, and predict one in eight."""
    model = read_model(path)
    assert count_parameters(model.config).total >= model.config.vocab_size
    if chance.random() < 0.125:
        workload: dict[str, Any] = {"phase": chance.choice(("train", "prefill", "decode"))}
        workload |= {"seq_len": chance.choice((1, 7, 512, 4096)), "micro_batch_size": chance.choice((1, 3, 64))}
        layout = {"tensor_parallel": chance.choice((1, 1, 2, 4)), "pipeline_parallel": chance.choice((1, 1, 2))}
        check_prediction(
            build_scenario(model, chance.choice(list_devices()), workload=workload, layout=layout).predict()
        )


# What more work may save: more rows reach faster kernels in small GEMMs of decode, powers of two are slow strides on
# MI100 and MI200, and odd contexts slow unfused attention.
LARGEST_GAINS = {"layers": 0.0, "batch": 0.20, "length": 0.20}


def make_base(chance: Random) -> bytes:
    """A config of a random shape, which is sound."""
    kv_heads, head_dim = chance.choice((1, 2, 5, 8)), chance.choice((32, 64, 80, 96, 128, 133))
    heads = kv_heads * chance.choice((1, 2, 4))
    return as_json(
        {
            "model_type": "llama", "hidden_size": heads * head_dim, "num_attention_heads": heads, "head_dim": head_dim,
            "num_key_value_heads": kv_heads, "num_hidden_layers": chance.randrange(1, 40),
            "intermediate_size": chance.randrange(1, 20_000), "vocab_size": chance.choice((1, 1000, 50_257, 128_256)),
        }
    )  # fmt: skip


# An unmeasured device with other rates may be nearest to another measured one, whose small GEMMs start later.
LARGEST_LOSSES = {"memory": 0.15, "matrix units": 0.15}


def use_base(path: Path, chance: Random) -> None:
    """Predict a shape: parts add up, more work is not faster, faster devices are not slower, names do not matter.

    More tensor parallelism does not add weights to a device either.
    """
    values = json.loads(path.read_bytes())
    device = load_device(chance.choice(list_devices()))
    workload: dict[str, Any] = {"phase": chance.choice(("train", "prefill", "decode")), "dtype": "fp16"}
    workload |= {"seq_len": chance.choice((128, 512, 2000, 4096)), "micro_batch_size": chance.choice((1, 3, 8, 20))}
    workload |= {"context_len": chance.choice((1, 999, 4096))} if workload["phase"] == "decode" else {}

    def step(config: dict[str, Any], **changes: Any) -> Prediction:
        return build_scenario(read_model(config), device, workload={**workload, **changes}).predict()

    def split_over(num_devices: int) -> float:
        layout = {"tensor_parallel": num_devices}
        return float(build_scenario(read_model(values), device, layout=layout).predict().memory.weights_bytes)

    base = step(values)
    check_prediction(base)
    assert math.isclose(sum(entry.total_time_s for entry in base.operations), base.step_time_s, rel_tol=1e-9)
    length = "context_len" if workload["phase"] == "decode" else "seq_len"
    more = {
        "layers": step({**values, "num_hidden_layers": values["num_hidden_layers"] + 1}),
        "batch": step(values, micro_batch_size=workload["micro_batch_size"] + chance.choice((1, 2, 8))),
        "length": step(values, **{length: workload[length] + chance.choice((1, 64, 1000))}),
    }
    for name, found in more.items():
        least = (1.0 - LARGEST_GAINS[name]) * base.step_time_s
        assert found.step_time_s >= least, f"more {name} is faster on {device.name}"
    times = chance.choice((1.02, 1.5, 2.0))
    rates = {name: times * rate for name, rate in device.dense_flops_per_s.items()}
    clock = device.boost_clock_hz and times * device.boost_clock_hz
    faster = {
        "memory": replace(device, memory_bandwidth_bytes_per_s=times * device.memory_bandwidth_bytes_per_s),
        "matrix units": replace(device, dense_flops_per_s=rates, boost_clock_hz=clock),
    }
    for name, other in faster.items():
        found = build_scenario(read_model(values), other, workload=workload).predict()
        most = (1.0 + LARGEST_LOSSES[name]) * base.step_time_s
        assert found.step_time_s <= most, f"faster {name} make a slower {device.name}"
    if values["num_key_value_heads"] % 2 == 0 and values["intermediate_size"] % 2 == 0:
        assert split_over(2) <= split_over(1), f"tensor parallelism adds weights on {device.name}"
    keys = list(values)
    chance.shuffle(keys)
    assert step(
        {**{key: values[key] for key in keys}, "model_type": "mistral", "sliding_window": None}
    ).step_time_s == (base.step_time_s)


@cache
def calibration() -> dict[str, Any]:
    """A calibration file."""
    with tempfile.TemporaryDirectory() as folder:
        content: dict[str, Any] = json.loads(write_late_calibration(Path(folder) / "own.json", 2.0).read_text("utf-8"))
    return content


def make_calibration(chance: Random) -> bytes:
    """A calibration file with spoilt values, or with a spoilt text."""
    content = as_json(spoil_object(calibration(), chance, [calibration()["records"]["gemm"]]))
    return spoil_bytes(content, chance) if chance.random() < 0.1 else content


def use_calibration(path: Path, _chance: Random) -> None:
    """Predict with the file."""
    check_prediction(build_scenario("gpt2", calibrated_device(H100.name, path)).predict())


DEVICE_VALUES = (
    "nan", "inf", "-inf", "1e308", "1e-308", "-1", "0", "0.0", "true", '"x"', '""', "[]", "{}", "[1]", "2024-01-01",
    "9223372036854775807", "1e12", "1e15", '"\\u001b[31m"', '"a100-sxm-40gb"', '{a = 1}',
)  # fmt: skip


def make_device(chance: Random) -> bytes:
    """The file of a device with some values replaced, or with a spoilt text."""
    content = read_device_text(chance.choice(list_devices()))
    if chance.random() < 0.2:
        return spoil_bytes(content.encode(), chance)
    lines = content.splitlines()
    for place in chance.sample([index for index, line in enumerate(lines) if " = " in line], 2):
        value = chance.choice((*DEVICE_VALUES, *map(str, SAME_TYPE)))
        lines[place] = f"{lines[place].partition(' = ')[0]} = {value}"
    return "\n".join(lines).encode()


def use_device(path: Path, chance: Random) -> None:
    """Predict on the device."""
    device = read_device_file(path)
    check_prediction(build_scenario("gpt2", device, workload={"phase": chance.choice(("train", "decode"))}).predict())


RUN = Run(
    run_id="r1", started_utc="2026-01-01T00:00:00+00:00", command="shapewright bench smoke", suite="smoke",
    device="h200-sxm-141gb", device_facts={"num_sms": 132}, driver="580.1", runtime="cuda 13.0", torch_version="2.13.0",
    library="torch 2.13.0", shapewright_version="0.1.0",
)  # fmt: skip


def stored_row(m: int) -> Row:
    """A row of a measured GEMM."""
    facts = row_facts(Case(operation=Gemm(name="x", m=m, n=16, k=32)), RUN)
    now = "2026-01-01T00:00:01+00:00"
    return Row(**facts, measured_utc=now, status=OK, median_s=1e-5, num_samples=10, launch_s=3e-6)


@cache
def sound_store() -> bytes:
    """A store of 40 rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        with Store(path) as store:
            store.add_run(RUN)
            for m in range(1, 41):
                store.add(stored_row(m))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        return path.read_bytes()


def make_store(chance: Random) -> bytes:
    """A store with flipped bits, swapped, torn or zeroed pages, or another schema version."""
    content = bytearray(sound_store())
    size = 4096
    for _ in range(chance.choice((1, 1, 2, 5))):
        way, pages = chance.randrange(5), len(content) // size
        if way == 0 or not pages:
            bit = chance.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
        elif way == 1:
            one, two = (size * chance.randrange(pages) for _ in range(2))
            content[one : one + size], content[two : two + size] = content[two : two + size], content[one : one + size]
        elif way == 2:
            start = size * chance.randrange(pages) + 512 * chance.randrange(8)
            content[start : start + 512] = bytes(512)
        elif way == 3:
            content[60:64] = chance.randrange(2**16).to_bytes(4, "big")
        elif len(content) > size:
            del content[chance.randrange(size, len(content)) :]
    return bytes(content)


@cache
def true_rows() -> dict[str, Row]:
    """Rows of the sound store by key."""
    return {row.key: row for row in map(stored_row, range(1, 41))}


def use_store(path: Path, _chance: Random) -> None:
    """Read every row; none may differ from what was stored."""
    with Store(path, read_only=True) as store:
        problems, rows = store.verify(), store.rows()
    assert problems or {row.key for row in rows} == true_rows().keys()
    assert all(row == true_rows().get(row.key) for row in rows)


@cache
def tables() -> dict[str, bytes]:
    """A measured table in both formats."""
    columns = gemm_columns([1e-5] * 5)
    with tempfile.TemporaryDirectory() as folder:
        parquet = write_parquet(Path(folder) / "gemm.parquet", columns).read_bytes()
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    return {"parquet": parquet, "csv": "\n".join(rows).encode()}


def make_parquet(chance: Random) -> bytes:
    """A measured table with some values replaced, or with spoilt bytes."""
    if chance.random() < 0.5:
        return spoil_bytes(tables()["parquet"], chance)
    columns = dict(gemm_columns([1e-5] * 5))
    name = chance.choice(sorted(columns))
    column = list(columns[name])
    column[chance.randrange(5)] = chance.choice((None, 0, -1, 2**40, 2**62))
    columns[name] = chance.choice(
        (
            column,
            [math.nan] * 5,
            [math.inf] * 5,
            [-1e-5] * 5,
            [1e300] * 5,
            [0] * 5,
            ["\x1b"] * 5,
            [[1]] * 5,
            [b"\0"] * 5,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            return write_parquet(Path(folder) / "gemm.parquet", columns).read_bytes()
        except (TypeError, ValueError, OverflowError):  # mixed types, which the format cannot hold
            return tables()["parquet"]


def use_table(path: Path, _chance: Random) -> None:
    """Judge predictions on the table."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / f"gemm{path.suffix}"
        target.write_bytes(path.read_bytes())
        for row in evaluate_folder(folder).rows:
            assert all(math.isfinite(each) for each in (row.mape, row.bias) if each is not None)


def make_kernels(chance: Random) -> bytes:
    """A trace of kernels with spoilt values."""
    args = {"External id": 1, "Input Dims": [[64, 64], [64, 256]], "Input type": ["float", "float"], "device": 0}
    event = {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 1.0, "dur": 5.0, "pid": 0, "tid": 1, "args": args}
    kinds = {"ProfilerStep#3": "user_annotation", "aten::mm": "cpu_op", "sgemm": "kernel", "ncclKernel": "kernel"}
    events = [event | {"cat": kind, "name": name} for name, kind in kinds.items()]
    content = as_json(spoil_object({"schemaVersion": 1, "traceEvents": events}, chance, [event, args]))
    return spoil_bytes(content, chance) if chance.random() < 0.3 else content


def use_kernels(path: Path, _chance: Random) -> None:
    """Read the trace; its times are finite."""
    found = read_kernels(path)
    assert math.isfinite(found.span_s)
    assert found.span_s >= 0.0


def use_requests(path: Path, _chance: Random) -> None:
    """Read the requests; arrivals are finite and in order."""
    arrivals = read_requests(path).arrival_s
    assert all(map(math.isfinite, arrivals.tolist()))
    assert (arrivals[1:] >= arrivals[:-1]).all()


REQUESTS_CSV = b"arrival_s,input_len,output_len,prefix_id,prefix_len\n" + b"".join(
    b"%d.5,%d,20,a,10\n" % (number, 100 + number) for number in range(20)
)
REQUESTS_JSON = b"".join(
    as_json({"arrival_s": number, "input_length": 100, "output_length": 9}) + b"\n" for number in range(20)
)
LAUNCH_LINES = (
    b"vllm serve meta-llama/Llama-3.1-70B -tp 4 --pipeline-parallel-size=2 --max-model-len 8192 --max-num-seqs 64\n",
    b"python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dp 8 --context-length 4096\n",
    b'{"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}\n',
    b"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nfsdp_config: {fsdp_sharding_strategy: 1}\n",
    b"n_layer = 12\nn_head = 12\nn_embd = 768\nblock_size = 1024\nbatch_size = 12\n",
    b"python pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048\n",
)


@cache
def jobs() -> list[bytes]:
    """Launch lines, and files of every trainer."""
    written = []
    for name in FORMATS:
        for preset in ("llama-2-7b", "gpt2", "mixtral-8x7b"):
            try:
                written.append(write_format(name, read_model(preset).config).encode())
            except ShapewrightError:
                continue
    return [*LAUNCH_LINES, *written]


def use_job(path: Path, _chance: Random) -> None:
    """Read the job by its name and by its text, and its model where it has one."""
    found = read_job(path)
    assert repr(parse_job(path.read_bytes().decode("utf-8", "replace"))) == repr(found)  # NaN differs from itself
    if found.fields:
        count_parameters(read_model(None, found.fields).config)


ATTACKS: dict[str, Attack] = {
    "configs": Attack(".json", make_config, use_config),
    "bases": Attack(".json", make_base, use_base),
    "calibration": Attack(".json", make_calibration, use_calibration),
    "devices": Attack(".toml", make_device, use_device),
    "stores": Attack(".sqlite", make_store, use_store),
    "parquet": Attack(".parquet", make_parquet, use_table),
    "csv": Attack(".csv", lambda chance: spoil_bytes(tables()["csv"], chance), use_table),
    "kernels": Attack(".json", make_kernels, use_kernels),
    "requests": Attack(".csv", lambda chance: spoil_bytes(REQUESTS_CSV, chance), use_requests),
    "requests-json": Attack(".jsonl", lambda chance: spoil_bytes(REQUESTS_JSON, chance), use_requests),
    "jobs": Attack(".txt", lambda chance: spoil_bytes(chance.choice(jobs()), chance), use_job),
}


def outcome(attack: Attack, path: Path, seed: int) -> str:
    """Use a file; return ``used`` or ``refused``.

    Raises:
        AssertionError: an answer is wrong, or a message is not one printable line.
        Exception: anything but an error of the package.
    """
    try:
        attack.use(path, Random(seed))
    except ShapewrightError as error:
        message = str(error)
        assert message, "an empty message"
        assert message.isprintable(), f"message {message!r}"
        assert len(message) < 2000, f"message of {len(message)} characters"
        return "refused"
    return "used"
