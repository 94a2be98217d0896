"""The flows, their tasks and the command line. They define the order of the stages and pass references and numbers,
never tensors."""
