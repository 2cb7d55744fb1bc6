"""What an answer in JSON says of the question: the device in its nodes, and every field that was filled in."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.question import Question


def device_to_json(device: Device) -> dict[str, Any]:
    """Name, title and nodes of a device: the part of it that a question may change."""
    return {
        "name": device.name,
        "title": device.title,
        "node_size": device.node_size,
        "inter_node_bandwidth_bytes_per_s": device.inter_node_bandwidth_bytes_per_s,
    }


def question_to_json(question: Question) -> dict[str, Any]:
    """What is asked, every field filled in, for answers that have no prediction to say it."""
    return {
        "source": question.model.source,
        "notes": list(question.notes),
        "config": asdict(question.config),
        "device": device_to_json(question.device),
        "workload": asdict(question.workload),
        "layout": {**asdict(question.layout), "num_devices": question.layout.num_devices},
    }
