"""Jobs that the explorer's tests send."""

from __future__ import annotations

from typing import Any

ADDRESS = "http://127.0.0.1:8265"
GPT3: dict[str, Any] = {
    "preset": "gpt3-2.7b",
    "device": "a100-sxm-40gb",
    "workload": {"dtype": "fp16", "attention": "unfused"},
}
