"""Tracking: a run's commits and metrics are sent to experiment trackers: MLflow, TensorBoard, Weights & Biases.

Commits can be sent again from the store at any time; no stage reads anything from a tracker. To add a tracker, write
one module with its options and an implementation of `Tracker`, and add a row to trackers.py.

    trackers.py     the table of trackers, and the choice of a run's trackers from its options
    tracker.py      the interface of a tracker, its records, the metric points in them, and the commits of a run
    delivery.py     the interface for flows: append records to the outbox, deliver them in a background thread
    mlflow/, tensorboard.py, wandb.py   the trackers
"""
