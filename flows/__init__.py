"""What happens, in which order: Prefect flows, their tasks, the command line. References and numbers only, no tensors."""
