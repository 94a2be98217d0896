"""What a run reports about itself while it runs and at its end: its Prefect pages and its HTML report."""
