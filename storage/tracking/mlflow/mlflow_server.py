"""MLflow's server for this user alone, and the page /model-training, which opens the UI in its view "Model training".

MLflow's API reads and writes files at any place that an experiment, run, model or trace names, as the user who runs the
server. `serve` therefore puts LoginGate before all routes, and MLflow finds all files through a registry that this
module fills: it knows the directory of the store's artifacts, and no other place.

MLflow 3.17 stores the chosen view in the browser and shows the view "GenAI" if none was chosen. Its links drop the URL
parameter `workflowType`, so a URL can only choose the view of the first page. The page stores the choice as the UI's
own switch does, then opens the part of the UI that is given after `#`. `mlflow server --app-name penstock` has this
page, too: it finds `app` through the entry point of pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import uvicorn
from mlflow.exceptions import MlflowException
from mlflow.server import handlers
from mlflow.server.constants import (
    ARTIFACT_ROOT_ENV_VAR,
    ARTIFACTS_DESTINATION_ENV_VAR,
    BACKEND_STORE_URI_ENV_VAR,
    SERVE_ARTIFACTS_ENV_VAR,
)
from mlflow.server.fastapi_app import app
from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.tracing.utils.artifact_utils import TRACE_DATA_FILE_NAME
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.routing import Route

from penstock.storage.web.login import HOST, LoginGate, read_login

_ASSISTANT = "/ajax-api/3.0/mlflow/assistant"  # runs commands on this machine
# The view "Model training"; and the panel of the assistant stays closed, which would hide columns on the first visit.
_CHOOSE_VIEW = """localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"')
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true")"""
_HTML = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>MLflow</title>
<script>
{_CHOOSE_VIEW}
location.replace("/" + (location.hash || "#/experiments"))
</script>
</head>
</html>
"""

# Before the routes of the UI, which match all paths.
app.router.routes.insert(0, Route("/model-training", lambda request: HTMLResponse(_HTML)))


class StoreArtifacts(LocalArtifactRepository):
    """Artifacts in the store's directory. Symbolic links are resolved; their targets must be in that directory, too."""

    root: Path

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        self._check("")

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Delete a file or directory."""
        self._check(artifact_path or "")
        super().delete_artifacts(artifact_path)

    def download_trace_data(self) -> dict[str, Any]:
        """Return the data of the trace whose directory this is."""
        self._check(TRACE_DATA_FILE_NAME)
        return super().download_trace_data()

    def _check(self, artifact_path: str) -> None:
        """Raise MlflowException if a path leads out of `root`. Methods of the base class that are not overridden here
        check themselves that paths are inside `artifact_dir`."""
        if not Path(self.artifact_dir, artifact_path).resolve().is_relative_to(self.root):
            raise MlflowException.invalid_parameter_value(
                "artifacts outside of the store's directory are refused: use a path inside it"
            )


def serve(port: int, database: str, artifacts: Path) -> None:
    """Run the server on loopback until SIGTERM. MLflow finds artifacts in the directory `artifacts` only."""
    StoreArtifacts.root = artifacts.resolve()
    # The values of the registry are classes. MLflow refuses a URI whose scheme has no entry.
    schemes: dict[str, Any] = get_registered_artifact_repositories()
    schemes.clear()
    schemes.update({"": StoreArtifacts, "file": StoreArtifacts})
    artifacts.mkdir(parents=True, exist_ok=True)
    os.environ[BACKEND_STORE_URI_ENV_VAR] = database
    os.environ[ARTIFACT_ROOT_ENV_VAR] = artifacts.as_uri()  # also needed by runs that write to the database directly
    os.environ[ARTIFACTS_DESTINATION_ENV_VAR] = str(artifacts)
    os.environ[SERVE_ARTIFACTS_ENV_VAR] = "true"
    handlers.initialize_backend_stores(database, database, artifacts.as_uri())
    refusal = PlainTextResponse("Penstock does not start MLflow's assistant\n", 404)
    app.router.routes.insert(0, Route(_ASSISTANT + "/{rest:path}", lambda request: refusal))
    login = read_login(f"http://{HOST}:{port}")
    assert login is not None
    gate = LoginGate(app, port, login, script=_CHOOSE_VIEW, pages="/#")
    uvicorn.run(gate, host=HOST, port=port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--artifacts", type=Path, required=True)
    serve(**vars(parser.parse_args()))
