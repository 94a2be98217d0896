"""The flows, their tasks and the command line. They define the order of the stages. They pass references to
commits and numbers between stages, never tensors."""
