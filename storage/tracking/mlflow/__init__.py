"""The tracker for MLflow: every artifact of a run is an MLflow object, and related objects link to each other.

mlflow_options.py  options of the tracker; its URI; connects a run
mlflow_tracker.py  receives the records of a run: logs commits, each kind as its MLflow objects, and the page of the run
mlflow_runs.py     MLflow runs, links between pages, names and values that MLflow accepts, what pages show first
mlflow_models.py   logged models, registered versions, and the aliases champion and candidate
mlflow_samples.py  data sets with previews, and samples of a round as traces
mlflow_server.py   MLflow's server with a login, and a page that opens the right view
"""
