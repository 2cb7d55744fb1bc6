"""serve-plan with --arrivals and --trace: output, and one line for each kind of bad input."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest

import shapewright
from command_line import run as run_command
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.traffic import trace as trace_module
from shapewright.optimize.serving.traffic.requests import read_rates
from shapewright.optimize.serving.traffic.trace import read_trace

JOB = ["llama-3-8b", "--device", "h100-sxm-80gb", "--tp", "1", "--layouts", "1"]
RANDOM = ["--isl", "lognormal:800,400", "--osl", "geometric:100", "--requests", "400"]
ROWS = "arrival_s,prompt_len,output_len\n"


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    return run_command(["serve-plan", *JOB, *arguments], capsys)


def test_text_json_and_page_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Percentiles grow, goodput and limits are those requested, and the three forms show the same run."""
    page = tmp_path / "traffic.html"
    arguments = [*RANDOM, "--arrivals", "4/s,8/s", "--ttft-p90", "500ms", "--tpot-p90", "50ms"]
    code, text, _ = run([*arguments, "--html", str(page)], capsys)
    _, out, err = run([*arguments, "--json"], capsys)
    facts = json.loads(out)
    run_at_4 = facts["runs"][0]

    assert (code, err) == (0, "")
    assert [one["arrivals_per_s"] for one in facts["runs"]] == [4.0, 8.0]
    for name in ("ttft", "tpot", "e2e"):
        assert 0.0 < run_at_4[f"{name}_p50_s"] < run_at_4[f"{name}_p90_s"] < run_at_4[f"{name}_p99_s"]
        assert run_at_4[f"{name}_p90_low_s"] < run_at_4[f"{name}_p90_s"] < run_at_4[f"{name}_p90_high_s"]
    assert run_at_4["goodput_fraction"] == 1.0
    assert run_at_4["usd_per_million_tokens"] is None
    assert facts["best"] == 1
    assert facts["servers"][0]["largest_requests_per_s"] <= facts["servers"][0]["capacity_requests_per_s"]
    assert facts["servers"][0]["pass_error_median_fraction"] < 0.02
    for words in ("TTFT p90 at most 500 ms", "largest load", "best: server 1"):
        assert words in text
    for words in ("Assumptions", "Time to first token over load"):
        assert words in page.read_text(encoding="utf-8")


def test_the_next_command_plans_the_mean_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    """Distributions become their means, which the closed form takes."""
    _, text, _ = run([*RANDOM, "--arrivals", "4/s"], capsys)

    assert "--isl 800 --osl 100 " in text.splitlines()[-1]


def test_the_next_command_launches_the_best_server_for_the_lengths_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompts of 900 and 300 tokens are 600 on average; the plan has one instance of the best server."""
    path = tmp_path / "requests.csv"
    path.write_text(ROWS + "0,900,40\n1,300,20\n", encoding="utf-8")
    question = ["llama-3-8b", "--device", "l4,h100-sxm-80gb", "--trace", str(path), "--gpus", "2", "--tpot-p90", "30ms"]
    _, text, _ = run_command(["serve-plan", *question, "--usd-per-hour", "2"], capsys)
    _, out, _ = run_command(["serve-plan", *question, "--json"], capsys)
    facts = json.loads(out)
    best = facts["servers"][facts["runs"][facts["best"]]["server"]]
    words = text.splitlines()[-1].split()
    given = dict(zip(words[4::2], words[5::2], strict=True))

    assert "USD/1M tokens" in text
    assert (best["device"], best["mode"]) == ("h100-sxm-80gb", "aggregated")
    assert (given["--device"], given["--isl"], given["--osl"]) == ("h100-sxm-80gb", "600", "30")
    assert int(given["--gpus"]) == best["layout"]["num_devices"]
    _, launch, _ = run_command(words[2:], capsys)
    assert f"--tensor-parallel-size {best['layout']['tensor_parallel']} " in launch
    assert "kv-transfer" not in launch


def test_missed_limits_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and what to change."""
    code, text, _ = run([*RANDOM, "--arrivals", "4/s", "--tpot-p90", "1us"], capsys)

    assert code == 1
    assert "no server keeps the limits" in text


def test_trace_in_csv_and_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both forms hold the same requests; shared prefixes give hits; --arrivals scales the rate."""
    rows = [(0.0, 500, 20, "a", 320), (0.4, 600, 30, "a", 320), (1.0, 100, 10, "", 0)]
    first, second = tmp_path / "one.csv", tmp_path / "two.jsonl"
    names = ("arrival_s", "prompt_len", "output_len", "prefix_id", "prefix_len")
    first.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)), encoding="utf-8")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    second.write_text("\n".join(lines), encoding="utf-8")
    results = [json.loads(run(["--trace", str(path), "--json"], capsys)[1]) for path in (first, second)]
    faster = json.loads(run(["--trace", str(first), "--arrivals", "20/s", "--json"], capsys)[1])

    assert results[0] == results[1]
    assert results[0]["runs"][0]["arrivals_per_s"] == pytest.approx(2.0)
    assert results[0]["runs"][0]["prefix_hit_fraction"] == pytest.approx(320 / 1200)
    assert faster["runs"][0]["arrivals_per_s"] == 20.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arrivals", "12/s", "--isl", "zipf:2", "--osl", "10"], "is not a distribution of lengths"),
        (["--arrivals", "12/s", "--isl", "uniform:9,1", "--osl", "10"], "is not a distribution of lengths"),
        (["--arrivals", "12/s", "--isl", "10=-1,20=2", "--osl", "10"], "is not a distribution of lengths"),
        (["--arrivals", "12/s", "--isl", "nan", "--osl", "10"], "is not a distribution of lengths"),
        (["--arrivals", "soon", "--isl", "10", "--osl", "10"], "is not a rate above 0"),
        (["--arrivals", "-1/s", "--isl", "10", "--osl", "10"], "is not a rate above 0"),
        (["--arrivals", "1/week", "--isl", "10", "--osl", "10"], "is not a rate above 0"),
        (["--arrivals", "12/s", "--osl", "10"], "needs arrivals, --isl and --osl"),
        (["--arrivals", "2/s", "--isl", "10", "--osl", "10", "--requests", "0"], "num_requests=0"),
        (["--arrivals", "2/s", "--isl", "9000", "--osl", "10"], "exceed the 8192 tokens"),
        (["--arrivals", "2/s", "--isl", "10", "--osl", "10", "--ttft", "1s"], "give --ttft-p90"),
        (["--arrivals", "2/s", "--isl", "10", "--osl", "10", "--burstiness", "0"], "burstiness=0"),
        (["--arrivals", "2/s", "--isl", "10", "--osl", "10", "--address", "auto"], "no effect without engine='ray'"),
        (["--arrivals", "2/s", "--isl", "10", "--osl", "10", "--cached-prefix", "10"], "cached_len=10"),
        (["--isl", "10", "--osl", "10"], "--layouts needs --arrivals"),
        (["--trace", "missing.csv"], "cannot be read"),
        (
            ["--arrivals", "2/s", "--isl", "10", "--osl", "10", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "max_num_batched_tokens=8 must be at least max_num_seqs=9",
        ),
        (
            ["--arrivals", "2/s", "--isl", "4000", "--osl", "10", "--max-num-batched-tokens", "1"],
            "cuts the prompts into 40,000,000 passes, and at most 10,000,000 are simulated; give at least 4",
        ),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(arguments, capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--isl", "uniform:1,9", "--osl", "10"], "needs --arrivals"), (["--osl", "10"], "missing option --isl")],
)
def test_closed_form_takes_single_lengths(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without traffic, both lengths are needed and are numbers."""
    code, out, err = run_command(["serve-plan", *JOB[:3], *arguments], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_one_request_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    """The header counts one request, of one token, as one."""
    _, text, _ = run(["--arrivals", "2/s", "--isl", "1", "--osl", "10", "--requests", "1"], capsys)

    assert "1 request with seed 0, 1 token in and 10 out on average" in " ".join(text.split())


def test_overload_names_the_largest_load(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest load that is named is held; of several rates those beyond it are marked."""
    code, out, err = run([*RANDOM, "--arrivals", "9000/s"], capsys)
    largest = err.partition("the largest load is ")[2].partition(",")[0]
    held, text, _ = run([*RANDOM, "--arrivals", f"{largest},9000/s"], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--gpus" in err
    assert held == 0
    assert "overload" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no column 'arrival_s'"),
        (ROWS, "holds no requests"),
        ("timestamp,input_length,output_length\n27482,6955,52\n", "have no unit; name it arrival_s"),
        ("when,prompt_len,output_len\n0,1,1\n", "has no column 'arrival_s'"),
        (ROWS + "-1,10,10\n", "line 2: arrival_s='-1' must be seconds"),
        (ROWS + "5,10,10\n4,10,10\n", "line 3: arrival_s=4 is before the 5"),
        (ROWS + "0,0,10\n", "prompt_len='0' must be a whole number"),
        (ROWS + "0,10,1.5\n", "output_len='1.5' must be a whole number"),
        (ROWS + "0,10\n", "line 2: 2 cells"),
        (ROWS + "nan,10,10\n", "must be seconds"),
        (ROWS + "0,8000,1000\n", "max_position_embeddings=8192"),
        ("arrival_s,prompt_len,output_len,prefix_id\n0,1,1,a\n", "one of prefix_id and prefix_len"),
        ("arrival_s,prompt_len,output_len,prefix_id,prefix_len\n0,10,1,a,11\n", "prefix_len='11'"),
    ],
)
def test_bad_traces_are_one_line(content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr with the line of the file, exit code 2."""
    path = tmp_path / "requests.csv"
    path.write_text(content, encoding="utf-8")
    code, out, err = run(["--trace", str(path)], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_trace_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and numbers of requests beyond the limits are refused; other text is too."""
    path = tmp_path / "requests.csv"
    path.write_text(ROWS + "0,1,1\n" * 3, encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(trace_module, "MOST_REQUESTS", 2)
        with pytest.raises(WorkloadError, match="more than 2 requests"):
            read_trace(path)
    with monkeypatch.context() as patched:
        patched.setattr(trace_module, "MOST_FILE_BYTES", 10)
        with pytest.raises(WorkloadError, match="more than 10"):
            read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not csv or jsonl in UTF-8"):
        read_trace(path)
    lines = tmp_path / "requests.jsonl"
    lines.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(WorkloadError, match="line 1 is not a JSON object"):
        read_trace(lines)


def test_long_traces_take_little_memory(tmp_path: Path) -> None:
    """A request takes five numbers of 8 bytes while its trace is read, and no line is read in full that is too long.

    As Python's numbers it took 230 bytes, more than a gigabyte for five million requests.
    """
    path, num_requests = tmp_path / "requests.csv", 20_000
    path.write_text(ROWS + "".join(f"{i}.5,{1000 + i},{2000 + i}\n" for i in range(num_requests)), encoding="utf-8")
    lines = tmp_path / "requests.jsonl"
    lines.write_text('{"arrival_s": [' + "0," * 2_000_000 + "0]}", encoding="utf-8")
    tracemalloc.start()
    try:
        traffic = read_trace(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with pytest.raises(WorkloadError, match="line 1 has 1048576 characters; give a request in each line"):
            read_trace(lines)
        line_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (traffic.prompt_len[-1], traffic.output_len[-1], traffic.arrival_s[-1]) == (20_999, 21_999, 19_999.0)
    assert peak_bytes < 120 * num_requests
    assert line_bytes < 10e6


def test_prefixes_that_begin_in_a_later_line_are_read(tmp_path: Path) -> None:
    """Lines of jsonl need not have the same keys; the first request may share no prefix."""
    path = tmp_path / "requests.jsonl"
    line = '{"arrival_s": %d, "prompt_len": 100, "output_len": 9%s}\n'
    shared = ', "prefix_id": "chat", "prefix_len": 64'
    path.write_text("".join(line % (second, shared if second else "") for second in range(3)), encoding="utf-8")
    traffic = read_trace(path)

    assert traffic.prefix_len.tolist() == [0, 64, 64]
    assert traffic.prefix.tolist() == [-1, 0, 0]
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="has no column 'arrival_s'"):
        read_trace(path)


def test_dates_count_from_the_first(tmp_path: Path) -> None:
    """A trace with dates, and with the column names of a published one."""
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:50,396,109\n",
        encoding="utf-8",
    )
    traffic = read_trace(path)

    assert traffic.arrival_s.tolist() == [0.0, 3.5]
    assert traffic.prompt_len.tolist() == [374, 396]


def test_api_takes_devices_and_rates() -> None:
    """Each device and rate is a run; a device that does not hold the model is left out with a note."""
    found = shapewright.serve_traffic(
        "llama-3-8b",
        device="h100-sxm-80gb",
        devices=["l40s"],
        arrivals="1/s,2/s",
        prompt_len=200,
        output_len="geometric:40",
        num_requests=200,
        num_layouts=1,
        layout={"tensor_parallel": 1},
    )

    assert [(run.server, run.rate_per_s) for run in found.runs] == [(0, 1.0), (0, 2.0), (1, 1.0), (1, 2.0)]
    assert read_rates("60/min") == (1.0,)
    assert "largest load" in found._repr_html_()
    text = repr(found.servers[0])
    assert "cache_tokens=" in text
    assert len(text) < 2000  # without the tables of the times of passes


TWO_DEVICES = [
    *("serve-plan", "llama-3.1-8b", "--device", "h100-sxm-80gb,l40s", "--arrivals", "2/s", "--isl", "500"),
    *("--osl", "100", "--requests", "300", "--layouts", "1", "--tp", "1"),
]


@pytest.mark.parametrize(
    ("prices", "best"), [("h100-sxm-80gb=3,l40s=0.9", "l40s"), ("h100=0.8,l40s=0.9", "h100-sxm-80gb")]
)
def test_the_best_of_devices_with_prices_is_the_cheapest(
    prices: str, best: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both devices keep a rate alone, and the faster one costs more or less; tokens cost the price of their device."""
    own = {name: float(part.partition("=")[2]) for name, part in zip(("h100", "l40s"), prices.split(","), strict=True)}
    code, out, _ = run_command([*TWO_DEVICES, "--usd-per-hour", prices, "--json"], capsys)
    facts = json.loads(out)
    servers, runs = facts["servers"], facts["runs"]

    assert code == 0
    assert [server["usd_per_hour"] for server in servers] == [own["h100"], own["l40s"]]
    assert servers[runs[facts["best"]]["server"]]["device"] == best
    for run in runs:
        price = servers[run["server"]]["usd_per_hour"]
        assert run["usd_per_million_tokens"] * run["tokens_per_s"] * 3600.0 == pytest.approx(1e6 * price)


@pytest.mark.parametrize(
    ("prices", "words"),
    [
        ("l40s=1", "--usd-per-hour has prices of l40s, and the devices are h100-sxm-80gb, l40s; give one for each"),
        ("h100=1,l40s=1,t4=1", "prices of h100-sxm-80gb, l40s, t4, and the devices are h100-sxm-80gb, l40s"),
        ("h100=1,l40s=0", "usd_per_hour=0.0 must be a number from"),
        ("h100=1,l40s", "is not a price such as 2.5, or NAME=USD"),
    ],
)
def test_bad_prices_of_devices_are_one_line(prices: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every device needs a price above 0, and a price needs a device."""
    code, out, err = run_command([*TWO_DEVICES, "--usd-per-hour", prices], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_prices_by_device_are_of_simulated_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    """The closed form plans for one device, whose price is one number."""
    job = ["serve-plan", "llama-3-8b", "--device", "l40s", "--isl", "100", "--osl", "20"]
    code, out, err = run_command([*job, "--usd-per-hour", "l40s=1"], capsys)

    assert (code, out) == (2, "")
    assert "--usd-per-hour NAME=USD,... compares servers of several devices (--arrivals, --trace)" in err


def test_lent_intervals_are_noted() -> None:
    """A version without published throughput states whose intervals its percentiles have; one with its own does not."""

    def notes_of(server: str) -> list[str]:
        found = shapewright.serve_traffic(
            "llama-3-8b",
            device="h100-sxm-80gb",
            arrivals="1/s",
            prompt_len=200,
            output_len=40,
            num_requests=50,
            num_layouts=1,
            layout={"tensor_parallel": 1},
            server=server,
        )
        return [note for note in found.notes if "intervals are those of" in note]

    assert notes_of("vllm-0.19") == [
        "intervals are those of vllm-0.16: no published throughput of vllm-0.19 was compared"
    ]
    assert notes_of("vllm-0.16") == []


@pytest.mark.parametrize("name", ["requests.csv", "requests.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(name: str, tmp_path: Path) -> None:
    """Spreadsheets and PowerShell write one at the beginning of a file."""
    row = '{"arrival_s": 0, "prompt_len": 100, "output_len": 9}\n'
    path = tmp_path / name
    path.write_text(ROWS + "0,100,9\n" if name.endswith("csv") else row, encoding="utf-8-sig")

    assert read_trace(path).prompt_len.tolist() == [100]


def test_dates_without_a_zone_do_not_depend_on_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks in New York went from 2 to 3 o'clock on 2024-03-10, those of a server's log need not."""
    path = tmp_path / "requests.csv"
    path.write_text(ROWS + "".join(f"2024-03-10 0{hour}:30:00,100,9\n" for hour in (1, 2, 3)), encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        traffic = read_trace(path)
    time.tzset()

    assert traffic.arrival_s.tolist() == [0.0, 3600.0, 7200.0]
