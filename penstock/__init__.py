"""RL post-training for LLMs as a durable pipeline. The four packages are links to the folders beside this one:
`penstock.flows`, ..."""
