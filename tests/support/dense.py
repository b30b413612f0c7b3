"""Matrix products, convolutions and attention in numpy float64, element by element: what results are held against."""

import itertools
import math

import numpy as np


def matmul(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = np.broadcast_to(a, (*batch, *a.shape[-2:])), np.broadcast_to(b, (*batch, *b.shape[-2:]))
    return np.einsum("...mk,...kn->...mn", a, b)


def convolution(image, weight, before, after, stride, dilation, turned=False):
    """Every output element on its own: a sum over the taps that fall into the image."""
    image, weight = np.asarray(image, np.float64), np.asarray(weight, np.float64)
    axes = range(image.ndim - 2)
    per_group = weight.shape[1]
    made_per_group = weight.shape[0] // (image.shape[1] // per_group)
    extents = [
        len(range(0, image.shape[a + 2] + before[a] + after[a] - dilation[a] * (weight.shape[a + 2] - 1), stride[a]))
        for a in axes
    ]
    out = np.zeros((image.shape[0], weight.shape[0], *extents))
    for n, k, *place in np.ndindex(*out.shape):
        first = k // made_per_group * per_group
        for tap in itertools.product(*(range(weight.shape[a + 2]) for a in axes)):
            at = [place[a] * stride[a] + tap[a] * dilation[a] - before[a] for a in axes]
            if all(0 <= at[a] < image.shape[a + 2] for a in axes):
                used = tuple(weight.shape[a + 2] - 1 - tap[a] for a in axes) if turned else tap
                out[(n, k, *place)] += (
                    image[(n, slice(first, first + per_group), *at)] @ weight[(k, slice(None), *used)]
                )
    return out


def convolution_gradients(image, weight, loss, before, after, stride, dilation, turned=False):
    """(of image, of weight): each product of `convolution` on its own."""
    image, weight, loss = (np.asarray(x, np.float64) for x in (image, weight, loss))
    axes = range(image.ndim - 2)
    per_group = weight.shape[1]
    made_per_group = weight.shape[0] // (image.shape[1] // per_group)
    of_image, of_weight = np.zeros_like(image), np.zeros_like(weight)
    for n, k, *place in np.ndindex(*loss.shape):
        first = k // made_per_group * per_group
        for tap in itertools.product(*(range(weight.shape[a + 2]) for a in axes)):
            at = [place[a] * stride[a] + tap[a] * dilation[a] - before[a] for a in axes]
            if all(0 <= at[a] < image.shape[a + 2] for a in axes):
                used = tuple(weight.shape[a + 2] - 1 - tap[a] for a in axes) if turned else tap
                seen, taken = (n, slice(first, first + per_group), *at), (k, slice(None), *used)
                of_image[seen] += loss[(n, k, *place)] * weight[taken]
                of_weight[taken] += loss[(n, k, *place)] * image[seen]
    return of_image, of_weight


def softmax(x):
    """Along the last axis."""
    x = np.asarray(x, np.float64)
    return np.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True))


def attention(q, k, v, scale=1.0, bias=None, left=None, right=None, bottom_right=False):
    """(O, Stats), row by row over the columns that it attends to alone."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, rows, _ = q.shape
    columns = k.shape[2]
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, np.float64), (batch, heads, rows, columns))
    out, stats = np.zeros((batch, heads, rows, v.shape[3])), np.full((batch, heads, rows, 1), -math.inf)
    for b, h, i in np.ndindex(batch, heads, rows):
        keys, values = k[b, h // (heads // k.shape[1])], v[b, h // (heads // v.shape[1])]
        diagonal = i + (columns - rows if bottom_right else 0)
        seen = [
            j
            for j in range(columns)
            if (right is None or j <= diagonal + right) and (left is None or j > diagonal - left)
        ]
        if seen:
            scores = np.array([keys[j] @ q[b, h, i] * scale for j in seen])
            if bias is not None:
                scores += bias[b, h, i, seen]
            stats[b, h, i] = np.logaddexp.reduce(scores)
            out[b, h, i] = np.exp(scores - stats[b, h, i]) @ values[seen]
    return out, stats
