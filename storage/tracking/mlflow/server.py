"""MLflow's server with one more page, /model-training, which opens the UI in its view "Model training".

MLflow 3.17 stores the chosen view in the browser and shows "GenAI" without a choice. Its links drop the URL parameter
`workflowType`, so that a URL can only choose the view of the first page. The page stores the choice as the UI's own
switch does, then opens the part of the UI that is given after `#`.

`mlflow server --app-name penstock` finds `app` through the entry point of pyproject.toml.
"""

from __future__ import annotations

from mlflow.server.fastapi_app import app
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>MLflow</title>
<script>
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"')
location.replace("/" + (location.hash || "#/experiments"))
</script>
</head>
</html>
"""


async def open_model_training(request: Request) -> HTMLResponse:
    """Return the page."""
    return HTMLResponse(_HTML)


app.router.routes.insert(
    0, Route("/model-training", open_model_training)
)  # before the routes of the UI, which match all paths
