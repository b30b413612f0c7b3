"""The op graph as data: the graph that a user recorded, the frozen graph, its checks and its printed forms."""
