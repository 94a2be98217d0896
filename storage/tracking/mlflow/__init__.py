"""The tracker for MLflow: every artifact of a run is an MLflow object, with links in both directions.

    tracker.py    receives the records of a run
    commits.py    logs commits, each kind as its MLflow objects
    run_page.py   description, user, source and origins of a run, its parent and forks
    runs.py       MLflow runs: a run is an MLflow run with child runs (lineage.py)
    artifact_paths.py  paths of artifacts in a database that was moved with its store
    models.py     logged models: source models, converted models, checkpoints, exports
    datasets.py   data sets: prompt files, rollout shards, samples of evaluations
    links.py      links between MLflow pages, in descriptions
    registry.py   registered versions of evaluated checkpoints, and the aliases champion and candidate
    traces.py     samples of a round as traces
    figure.py     the reward curve
    server.py     MLflow's server with a page that opens the right view
    values.py     names, parameters and metrics in the form that MLflow accepts

Delivery is idempotent: MLflow objects are found by their tags, and MLflow identifies a metric point by run, name, step,
time and value, which are all equal when a record is sent again. A fork contains copies of its parent's commits; their
metrics are logged for the fork, too, but their artifacts are MLflow objects of the parent only.
"""
