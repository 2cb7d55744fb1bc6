"""The application: one page, and a JSON API under /api/v1 that is described in OpenAPI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, Path, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shapewright import __version__
from shapewright.explorer import answers, catalogue, figures, problems, sweeps
from shapewright.explorer.api_models import (
    CompareRequest,
    ExplainRequest,
    JobRequest,
    MemoryRequest,
    PredictRequest,
    SearchRequestBody,
    SweepRequest,
    TilesRequest,
)
from shapewright.explorer.assets import load_assets, serve_asset
from shapewright.explorer.guard import Guard
from shapewright.explorer.job import ask_job
from shapewright.explorer.known_devices import KnownDevices
from shapewright.explorer.measured import Measurements
from shapewright.explorer.openapi import NOT_FOUND, OBJECT, PROBLEMS, QUEUE_FULL, describe_problems
from shapewright.explorer.search_jobs import QueueFullError, SearchQueue, SearchRun

API = "/api/v1"
# Answers are computed, not waited for: more threads than cores would only take turns.
_NUM_THREADS = 2
_MOST_WAITING = 128  # in the lane of what takes long; a page asks for ten at once

# A page of its own, with its script inside, is for the disk and never for this address.
_AS_FILE = {"Content-Disposition": 'attachment; filename="report.html"'}

# How the routes that compute something from a job are described.
_ANSWER: dict[str, Any] = {
    "responses": {**PROBLEMS, **QUEUE_FULL, 200: {"description": "The answer.", "content": OBJECT}},
    "response_class": Response,
    "tags": ["questions"],
}


def create_app(
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    queue: SearchQueue | None = None,
    measured: Measurements | None = None,
    devices: KnownDevices | None = None,
) -> FastAPI:
    """Make the application.

    Args:
        host: Name or address that it is reached by, beside those of this very machine.
        token: What every request has to bring; None on loopback alone.
        queue: Where searches wait; for tests.
        measured: What to set beside predictions.
        devices: What requests may name; None for the devices of the package.
    """
    devices = devices or KnownDevices()
    searches = queue or SearchQueue(calibration=devices.calibration)

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = _NUM_THREADS
        app.state.slow_lane = anyio.CapacityLimiter(1)
        yield
        await searches.close()

    app = FastAPI(
        title="Shapewright",
        version=__version__,
        description="Which transformer shape fits your hardware, what a bad one costs, and what to use instead. "
        "Answers are those of the command line's --json (docs/json.md), with its printed text under `text`.",
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=live,
        generate_unique_id_function=lambda route: route.name,
    )
    problems.install(app)
    measured = measured or Measurements()
    _add_quick_questions(app, measured, devices)
    _add_slow_questions(app, measured, devices)
    _add_files(app, devices)
    _add_catalogue(app, devices)
    _add_searches(app, searches, devices)
    _add_page(app)
    describe_problems(app)
    app.add_middleware(Guard, host=host, token=token)
    return app


def _json(answer: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(answer, allow_nan=False), status_code=status, media_type="application/json")


def _add_quick_questions(app: FastAPI, measured: Measurements, devices: KnownDevices) -> None:
    """What a slider asks for at each move."""

    @app.post(f"{API}/predict", summary="Time, throughput and memory of one step, operation by operation", **_ANSWER)
    def predict(body: PredictRequest) -> Response:
        baseline = None if body.baseline is None else ask_job(body.baseline, devices)
        return _json(answers.answer_predict(ask_job(body.job, devices), baseline))

    @app.post(f"{API}/explain", summary="Formula, inputs, source and record of an operation", **_ANSWER)
    def explain(body: ExplainRequest) -> Response:
        return _json(answers.answer_explain(ask_job(body.job, devices), body.operation))

    @app.post(f"{API}/tiles", summary="Tiles and waves of one product", **_ANSWER)
    def tiles(body: TilesRequest) -> Response:
        return _json(figures.answer_tiles(ask_job(body.job, devices), body.operation, body.pass_name, measured))

    @app.post(f"{API}/config", summary="The model as a config.json object, in the form that it was read in", **_ANSWER)
    def config(body: JobRequest) -> Response:
        return _json(answers.answer_config(ask_job(body.job, devices)))


def _add_slow_questions(app: FastAPI, measured: Measurements, devices: KnownDevices) -> None:
    """What predicts many steps, one question at a time."""

    @app.post(f"{API}/check", summary="Findings with their cost, and nearest better shapes", **_ANSWER)
    async def check(body: JobRequest) -> Response:
        return _json(await _slowly(app, lambda: answers.answer_check(ask_job(body.job, devices))))

    @app.post(f"{API}/memory", summary="Memory by component and stage, what fits, and remedies", **_ANSWER)
    async def memory(body: MemoryRequest) -> Response:
        return _json(await _slowly(app, lambda: answers.answer_capacity(ask_job(body.job, devices), body.optimizer)))

    @app.post(f"{API}/compare", summary="The same job on several devices", **_ANSWER)
    async def compare(body: CompareRequest) -> Response:
        prices = body.usd_per_hour
        return _json(await _slowly(app, lambda: answers.answer_compare(body.job, body.devices, prices, devices)))

    @app.post(f"{API}/breakdown", summary="Layer, roofline, losses and pipeline as figures", **_ANSWER)
    async def breakdown(body: JobRequest) -> Response:
        return _json(await _slowly(app, lambda: figures.answer_breakdown(ask_job(body.job, devices))))

    @app.post(
        f"{API}/sweep", summary="Throughput over one field, with wave ends, alignment classes and crests", **_ANSWER
    )
    async def sweep(body: SweepRequest) -> Response:
        wanted = body.field, body.measure, body.values
        return _json(await _slowly(app, lambda: sweeps.answer_sweep(ask_job(body.job, devices), *wanted, measured)))

    @app.post(f"{API}/heat-map", summary="Model rate over numbers of heads and hidden sizes", **_ANSWER)
    async def heat_map(body: JobRequest) -> Response:
        return _json(await _slowly(app, lambda: sweeps.answer_heat(ask_job(body.job, devices))))


def _add_files(app: FastAPI, devices: KnownDevices) -> None:
    """Answers to keep: a page and a table."""
    page_how = {**_ANSWER, "responses": {**PROBLEMS, 200: {"description": "One file.", "content": {"text/html": {}}}}}

    @app.post(f"{API}/report.html", summary="The case for or against the shape, as one self-contained page", **page_how)
    async def report(body: JobRequest) -> Response:
        page = await _slowly(app, lambda: answers.answer_report(ask_job(body.job, devices)))
        return Response(page, media_type="text/html", headers=_AS_FILE)

    csv_how = {**_ANSWER, "responses": {**PROBLEMS, 200: {"description": "Rows.", "content": {"text/csv": {}}}}}

    @app.post(f"{API}/operations.csv", summary="Every operation as CSV", **csv_how)
    def operations(body: JobRequest) -> Response:
        return Response(answers.answer_csv(ask_job(body.job, devices)), media_type="text/csv")


async def _slowly(app: FastAPI, make: Callable[[], Any]) -> Any:
    """Answer in the lane of what takes long, so that a slider's prediction never waits behind it."""
    if app.state.slow_lane.statistics().tasks_waiting >= _MOST_WAITING:
        raise QueueFullError(f"{_MOST_WAITING} questions wait already; ask again in a moment")
    return await anyio.to_thread.run_sync(make, limiter=app.state.slow_lane)


def _add_catalogue(app: FastAPI, known: KnownDevices) -> None:
    """What there is to choose from."""
    how: dict[str, Any] = {
        "responses": {200: {"description": "All there is.", "content": OBJECT}},
        "response_class": Response,
        "tags": ["catalogue"],
    }

    @app.get(API, summary="Version, and the fields of models, workloads and layouts", **how)
    def about() -> Response:
        return _json(catalogue.answer_about(known))

    @app.get(f"{API}/devices", summary="Every device with its numbers and their sources", **how)
    def devices() -> Response:
        return _json(catalogue.answer_devices(known))

    @app.get(f"{API}/models", summary="Every preset with its shape", **how)
    def models() -> Response:
        return _json(catalogue.answer_models())

    one = {**how, "responses": {**how["responses"], **NOT_FOUND}}

    @app.get(f"{API}/models/{{name}}", summary="One preset with its config.json", **one)
    def model(name: str = Path(max_length=200)) -> Response:
        try:
            return _json(catalogue.answer_model(name))
        except ValueError as error:
            raise HTTPException(404, str(error)) from None

    @app.get(f"{API}/rules", summary="Every rule with its page", **how)
    def rules() -> Response:
        return _json(catalogue.answer_rules())


def _add_searches(app: FastAPI, searches: SearchQueue, devices: KnownDevices) -> None:
    """Searches: put one in, look at it, stop it."""
    how: dict[str, Any] = {"response_class": Response, "tags": ["searches"]}
    done: dict[int | str, dict[str, Any]] = {200: {"description": "State, progress and result.", "content": OBJECT}}

    def find(run_id: str) -> SearchRun:
        run = searches.find(run_id)
        if run is None:
            raise HTTPException(404, f"no search {ascii(run_id)[:40]}; it may be over for long: start it again")
        return run

    @app.post(
        f"{API}/searches",
        summary="Start a search for faster shapes of the same size",
        status_code=202,
        responses={**PROBLEMS, **QUEUE_FULL, 202: {"description": "It waits or runs.", "content": OBJECT}},
        **how,
    )
    async def start_search(body: SearchRequestBody) -> Response:
        await anyio.to_thread.run_sync(
            lambda: ask_job(body.job, devices).predict()
        )  # what cannot run is refused at once
        run = searches.submit(body.model_dump(mode="json", exclude_unset=False))
        answer = _json(run.to_json(), 202)
        answer.headers["Location"] = f"{API}/searches/{run.id}"
        return answer

    @app.get(f"{API}/searches/{{run_id}}", summary="State of a search", responses={**done, **NOT_FOUND}, **how)
    async def show_search(run_id: str = Path(max_length=64)) -> Response:
        return _json(find(run_id).to_json())

    @app.delete(
        f"{API}/searches/{{run_id}}",
        summary="Stop a search; one that runs gives its best so far",
        responses={**done, **NOT_FOUND},
        **how,
    )
    async def stop_search(run_id: str = Path(max_length=64)) -> Response:
        run = find(run_id)
        searches.cancel(run)
        return _json(run.to_json())


def _add_page(app: FastAPI) -> None:
    """The page's own files, each under a path that is known beforehand."""
    for path, asset in load_assets().items():

        async def show(request: Request, asset: Any = asset) -> Response:
            return serve_asset(asset, request)

        app.router.routes.append(APIRoute(path, show, methods=["GET", "HEAD"], include_in_schema=False))
