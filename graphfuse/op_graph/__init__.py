"""The op graph as data: what a user recorded, the frozen graph made of it, its checks and its printed forms."""
