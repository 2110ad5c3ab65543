"""RACER once more, slowly: nodes as objects with times, links by search, layers and paths as plain lists."""

from itertools import count


class Node:
    def __init__(self, slot, time):
        self.slot, self.time = slot, time
        self.order, self.buckets = [], 1  # children as the hash map lists them, [(token, node)]
        self.clear()
        self.parent = self.token = None

    def clear(self):
        self.freq = self.depth = 0
        self.order = []
        self.fail = None  # the root

    def get(self, token):
        return next((node for t, node in self.order if t == token), None)

    def add(self, token, node):
        primes = [13, 29, 59, 127, 257]
        if len(self.order) + 1 > (0 if self.buckets == 1 else self.buckets):
            self.buckets = primes[primes.index(self.buckets) + 1] if self.buckets > 1 else 13
            old, self.order = self.order, []
            for entry in old:
                self._place(entry)
        self._place((token, node))

    def _place(self, entry):
        same = [i for i, (t, _) in enumerate(self.order) if t % self.buckets == entry[0] % self.buckets]
        self.order.insert(same[0] if same else 0, entry)


class Racer:
    """`table` is {token: row}; zeros where it was not seen."""

    def __init__(self, nodes, k, ngram, trie_nodes, min_match):
        self.C, self.k, self.n, self.least = nodes + 1, k, ngram, min_match
        self.table = {}
        self.clock = count()
        self.pool = [Node(slot, next(self.clock)) for slot in reversed(range(trie_nodes))]  # the last slot is oldest
        self.root = self.state = self.take()

    def touch(self, node):
        node.time = next(self.clock)

    def take(self):
        node = min(self.pool, key=lambda node: node.time)
        if node.parent is not None and node.parent.get(node.token) is node:
            node.parent.order.remove((node.token, node))
        node.clear()
        self.touch(node)
        return node

    def insert(self, gram):
        now = self.root
        for token in gram:
            self.touch(now)
            if now.get(token) is None:
                child = self.take()
                child.parent, child.token, child.depth = now, token, now.depth + 1
                now.add(token, child)
            now = now.get(token)
            now.freq += 1
        self.touch(now)

    def find(self, path):
        now = self.root
        for token in path:
            now = now and now.get(token)
        return now

    def build(self):
        """Of every node reached: the longest proper suffix of its path that is there, searched from the root."""
        reached = [(self.root, ())]
        for node, path in reached:
            node.fail = next((f for i in range(1, len(path)) if (f := self.find(path[i:])) is not None), self.root)
            reached += [(child, (*path, token)) for token, child in node.order]

    def touch_prefix(self, node):
        while node is not self.root:
            self.touch(node)
            node.fail = self.root
            node = node.parent
        self.touch(self.root)

    def fallbacks(self, node):
        while node is not self.root:
            yield node
            node = node.fail or self.root
        yield self.root

    def walk(self, tokens):
        for token in tokens:
            self.touch(self.state)
            if self.state.get(token) is None:
                self.state = next((n for n in self.fallbacks(self.state) if n.get(token)), self.root)
                self.touch_prefix(self.state)
            self.state = self.state.get(token) or self.state
        self.touch(self.state)

    def begin(self, prompt):
        self.text = list(prompt)
        for end in range(self.n, len(prompt) + 1):
            self.insert(prompt[end - self.n : end])
        self.build()

    def commit(self, tokens):
        for token in tokens:
            self.text.append(token)
        for back in range(len(tokens)):
            end = len(self.text) - back
            if end >= self.n:
                self.insert(self.text[end - self.n : end])

    def learn(self, tokens, rows):
        for token, row in zip(tokens, rows, strict=True):
            self.table[token] = row

    def follow(self, root):
        """The borders."""
        found = [v for s in self.fallbacks(self.state) if (v := s.get(root)) is not None]
        borders = [v for v in found if v.depth >= self.least]
        self.state = found[0] if found else self.state
        for border in borders:
            self.touch_prefix(border)
        return borders

    def retrieved(self, borders):
        """Paths of nodes from a border down: those of all pairs that are selected."""
        kept, layer = [], [(v,) for v in borders]
        while layer:
            entered = False
            for path in layer:
                if len(kept) < self.C or path[-1].freq > min(p[-1].freq for p in kept):
                    kept.append(path)
                    entered = True
                if len(kept) > self.C:
                    kept.sort(key=lambda p: (p[-1].freq, -p[-1].depth, -p[-1].slot, -p[0].slot))
                    del kept[0]
            if not entered:
                break
            layer = [(*path, child) for path in layer for _, child in path[-1].order]
        return kept

    def row(self, token):
        return self.table.get(token, [0] * self.k)

    def draft(self, root):
        """Tokens and parents."""
        kept = self.retrieved(self.follow(root))
        inner = {path[:-1] for path in kept}
        ends = sorted((p for p in kept if p not in inner), key=lambda p: (p[-1].slot, p[0].slot))
        tree = Node(0, 0)
        self.made = 0
        paths = [[node.token for node in path] for path in ends]
        for path in [*paths, [root]]:
            self.grow(tree, path)
        self.refill(tree.get(root), root)
        tokens, parents, queue = [], [], [(root, tree.get(root), 0)]
        for token, node, parent in queue:
            queue += [(t, child, len(tokens)) for t, child in node.order]
            tokens.append(token)
            parents.append(parent)
        return tokens, parents

    def grow(self, node, path):
        for token in path:
            if node.get(token) is None:
                self.made += 1
                node.add(token, Node(0, 0))
            node = node.get(token)

    def refill(self, top, root):
        queue, seen = [(top, root, self.k, True)], [top]
        for node, token, b, is_root in queue:
            if self.made == self.C:
                break
            for i in range(b):
                below = self.row(token)[i]
                if node.get(below) is None and self.made < self.C:
                    self.grow(node, [below])
                child = node.get(below)
                if child is not None and child not in seen:
                    seen.append(child)
                    queue.append((child, below, max(1, (b if is_root else b // 2) // 2**i), False))
