"""Hostile configs, calibration files and devices, and what must hold for the predictions made with them."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from calibration_files import H100, write_late_calibration
from fuzz.spoil import SAME_TYPE, as_json, spoil_bytes, spoil_object
from shapewright.hardware.loader import list_devices, load_device, read_device_file, read_device_text
from shapewright.models.families.registry import FAMILIES
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, load_preset, read_model
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import Prediction
from shapewright.pricing.calibration.file import calibrated_device


@cache
def known_configs() -> list[dict[str, Any]]:
    """Configs of the presets, and of every known type with the values of transformers."""
    found = [dict(load_preset(name).config) for name in list_presets()]
    found += [{"model_type": name, **family.defaults} for name, family in FAMILIES.items()]
    return [each for each in found if each]


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
    formats = sorted({"bf16", "fp16"} & device.dense_flops_per_s.keys())
    workload: dict[str, Any] = {"phase": chance.choice(("train", "prefill", "decode"))}
    workload |= {"dtype": chance.choice(formats or ["bf16"])}
    workload |= {"seq_len": chance.choice((128, 512, 2000, 4096)), "micro_batch_size": chance.choice((1, 3, 8, 20))}
    workload |= {"context_len": chance.choice((1, 999, 4096))} if workload["phase"] == "decode" else {}

    def step(config: dict[str, Any], **changes: Any) -> Prediction:
        return build_scenario(read_model(config), device, workload={**workload, **changes}).predict()

    def split_over(num_devices: int) -> float:
        layout = {"tensor_parallel": num_devices}
        linked = replace(device, inter_node_bandwidth_bytes_per_s=device.inter_node_bandwidth_bytes_per_s or 1e10)
        scenario = build_scenario(read_model(values), linked, workload=workload, layout=layout)
        return float(scenario.predict().memory.weights_bytes)

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
    if all(values[name] % 2 == 0 for name in ("num_key_value_heads", "intermediate_size", "vocab_size")):
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
