"""The device code of the fused norm, in Triton.

Features are treated as pieces x positions x channels. Either of the last two is contiguous (channels_last or NCHW). A
piece is an image or, if there are too few images to keep a GPU busy, an equal part of one. `group` is the number of
pieces of a statistics group, and PIECES that of an image. A tile is BLOCK_P positions by BLOCK_C channels.

`HAS_PRIOR` is False for a first layer, whose belief is its observation. With a prior, `PREDICTS` says whether it is the
belief of the layer below, from which a full A predicts, or already the prediction. In the second case, A and R are not
read, and the gradients of the prior are those of the prediction.

Forward and backward need three launches each: a pass over the features that reduces every piece, a small step per
group, and a pass that writes the result. The small matrix products and sums of a layer run in further programs of the
same launches, where they cost almost nothing:

    forward     moments (+ predict)      believe        normalize_pieces (+ remember)
    backward    sums                     disbelieve     gradient (+ finish_backward)

If a pass is short, the small step is not a separate launch (MERGED): the last program to arrive runs it.

ReLU is a lower bound of 0 for the output; without ReLU the bound is -inf. Sums have a fixed order, so the same input
gives the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def tile(channel_block, channels, stride_c, stride_p, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Channels of the block, their mask, and the offsets of a tile at position 0."""
    c = channel_block * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    return c, c < channels, p, p[:, None] * stride_p + c[None, :] * stride_c


@triton.jit
def share_out(pid, riders, others):
    """The kind of work of a program: its index among the additional programs, or -1, and among the others, or -1.

    They alternate as long as both last, so the additional programs compute while the others wait for memory.
    """
    pairs = tl.minimum(riders, others)
    in_pairs = pid < 2 * pairs
    rides = tl.where(in_pairs, pid % 2 == 0, riders > others)
    rider = tl.where(in_pairs, pid // 2, pid - others)
    other = tl.where(in_pairs, pid // 2, pid - riders)
    return tl.where(rides, rider, -1), tl.where(rides, -1, other)


@triton.jit
def last_of(arrived, programs):
    """Whether this program is the last of a number of programs to arrive. It may then read the results of all."""
    tl.debug_barrier()  # all threads of this program have written
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived, 0)  # as the next launch expects
    return last


@triton.jit
def image_moments(x, first, offsets, p, c_mask, positions, stride_p, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and summed squared deviation of one image's channels.

    Every lane runs Welford's recurrence over its own positions, and the lanes are merged at the end. Values are
    relative to the first position, which keeps the precision of small deviations from large means.
    """
    shift = tl.load(x + first, mask=c_mask, other=0.0).to(tl.float32)
    mean = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    m2 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    seen = tl.zeros((BLOCK_P, 1), tl.float32)
    for start in range(0, positions, BLOCK_P):
        inside = (start + p < positions)[:, None]
        mask = inside & c_mask[None, :]
        value = tl.load(x + offsets + start * stride_p, mask=mask, other=0.0).to(tl.float32) - shift[None, :]
        seen += tl.where(inside, 1.0, 0.0)
        delta = tl.where(mask, value - mean, 0.0)
        mean += delta * (1.0 / tl.maximum(seen, 1.0))
        m2 += delta * (value - mean)
    total = tl.sum(mean * seen, axis=0) / positions
    off = mean - total[None, :]
    return shift + total, tl.sum(m2 + off * off * seen, axis=0)


@triton.jit
def column_sum(source, rows, c, c_mask, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, rows, BLOCK_R):
        mask = (start + r < rows)[:, None] & c_mask[None, :]
        total += tl.sum(tl.load(source + (start + r)[:, None] * channels + c[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit
def all_finite(mean, var, mask):
    """For each group, 1 if every belief of the block is finite, otherwise 0."""
    good = (tl.abs(mean) < float("inf")) & (tl.abs(var) < float("inf"))
    return tl.min(tl.where(mask & (good == 0), 0.0, 1.0), axis=1)


@triton.jit
def normalize_image(
    x, y, residual, offsets, p, c_mask, mean, scale, bias, floor, positions, stride_p,
    HAS_RESIDUAL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    for start in range(0, positions, BLOCK_P):
        mask = (start + p < positions)[:, None] & c_mask[None, :]
        at = offsets + start * stride_p
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + bias[None, :]
        if HAS_RESIDUAL:
            value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(value < floor, floor, value)  # keeps NaN
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def predict(
    tile_k, tile_g, tile_o, prior_mean, prior_var, transition, partial_mean, partial_var,
    groups, inputs, channels,
    BLOCK_G: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A m and (A*A) v over the `tile_k`-th part of SPLIT inputs; `believe` adds the parts."""
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    g = tile_g * BLOCK_G + tl.arange(0, BLOCK_G)
    i = tile_k * SPLIT + tl.arange(0, BLOCK_I)
    mean = tl.zeros((BLOCK_G, BLOCK_O), tl.float32)
    var = tl.zeros((BLOCK_G, BLOCK_O), tl.float32)
    for start in range(0, SPLIT, BLOCK_I):
        i_mask = start + i < inputs
        at = g[:, None] * inputs + (start + i)[None, :]
        mask = (g < groups)[:, None] & i_mask[None, :]
        m = tl.load(prior_mean + at, mask=mask, other=0.0)
        v = tl.load(prior_var + at, mask=mask, other=0.0)
        a = tl.load(
            transition + o[None, :] * inputs + (start + i)[:, None],
            mask=(o < channels)[None, :] & i_mask[:, None],
            other=0.0,
        ).to(tl.float32)
        mean = tl.dot(m, a, mean, input_precision=PRECISION)
        var = tl.dot(v, a * a, var, input_precision=PRECISION)
    at = (tile_k * groups + g)[:, None] * channels + o[None, :]
    mask = (g < groups)[:, None] & (o < channels)[None, :]
    tl.store(partial_mean + at, mean, mask=mask)
    tl.store(partial_var + at, var, mask=mask)


@triton.jit
def softplus(raw):
    """log(1 + exp(raw)), computed so that it is exp(raw), not 0, for very negative raw."""
    small = tl.exp(-tl.abs(raw))
    return tl.maximum(raw, 0.0) + tl.where(small < 1e-3, small * (1 - small * (0.5 - small / 3)), tl.log(1 + small))


@triton.jit
def observe_group(
    g, c, c_mask, work, beliefs, image_mean, image_var, image_spread, channels, pieces, groups, group, own,
    EXPECT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the observation of a group from the statistics of its pieces."""
    i = tl.arange(0, BLOCK_R)
    one_mean = work + g * group * channels
    one_var = one_mean + pieces * channels
    mean = column_sum(one_mean, group, c, c_mask, channels, BLOCK_R, BLOCK_C) / group
    var_sum = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, group, BLOCK_R):
        at = (start + i)[:, None] * channels + c[None, :]
        mask = (start + i < group)[:, None] & c_mask[None, :]
        off = tl.where(mask, tl.load(one_mean + at, mask=mask, other=0.0) - mean[None, :], 0.0)
        var_sum += tl.sum(off * off + tl.load(one_var + at, mask=mask, other=0.0), axis=0)
    var = var_sum / group
    if EXPECT:  # RunningNorm.expect
        partners = tl.load(image_mean + c, mask=c_mask, other=0.0).to(tl.float32)
        off = mean - partners
        within = tl.load(image_var + c, mask=c_mask, other=0.0).to(tl.float32)
        spread = tl.load(image_spread + c, mask=c_mask, other=0.0).to(tl.float32)
        mean = partners + own * off
        var = within + own * (var - within) + (1 - own) * (own * off * off + (1 - own) * spread)
    row, size = g * channels + c, groups * channels
    tl.store(beliefs + 2 * size + row, mean, mask=c_mask)
    tl.store(beliefs + 3 * size + row, var, mask=c_mask)
    return mean, var


@triton.jit
def update_groups(
    mean, var, g, block, c, c_mask, work, prior_mean, prior_var, beliefs, raw_noise, raw_gain,
    channels, pieces, groups, stretches, noise_stride, blocks,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute beliefs from observations, (groups `g`, channels `c`), and the prediction or its parts."""
    mask = (g < groups)[:, None] & c_mask[None, :]
    row, size = g[:, None] * channels + c[None, :], groups * channels
    partial_mean = work + 2 * pieces * channels
    partial_var = partial_mean + stretches * size
    if HAS_PRIOR:  # bkn_zoo.norms.kalman.update
        if PREDICTS:
            pm = tl.zeros_like(mean)
            noise = softplus(tl.load(raw_noise + c * noise_stride, mask=c_mask, other=0.0).to(tl.float32))
            pv = pm + noise[None, :]
            for k in range(stretches):
                pm += tl.load(partial_mean + k * size + row, mask=mask, other=0.0)
                pv += tl.load(partial_var + k * size + row, mask=mask, other=0.0)
        else:
            pm = tl.load(prior_mean + row, mask=mask, other=0.0)
            pv = tl.load(prior_var + row, mask=mask, other=0.0)
        q = tl.sigmoid(tl.load(raw_gain).to(tl.float32))
        innovation = mean - pm
        mean = tl.where(q < 0.5, pm + q * innovation, mean - (1 - q) * innovation)  # exact at both ends
        var = (1 - q) * pv + q * var + (1 - q) * q * innovation * innovation
    tl.store(beliefs + row, mean, mask=mask)
    tl.store(beliefs + size + row, var, mask=mask)
    tl.store(partial_var + stretches * size + g * blocks + block, all_finite(mean, var, mask), mask=g < groups)


@triton.jit(do_not_specialize=["positions", "groups", "pieces", "group", "stretches", "predict_tiles"])
def moments(
    x, work, arrived, prior_mean, prior_var, transition, beliefs, raw_noise, raw_gain,
    image_mean, image_var, image_spread,
    channels, positions, stride_c, stride_p, pieces, groups, group, inputs, stretches, predict_tiles, noise_stride, own,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, EXPECT: tl.constexpr, MERGED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: channel blocks x pieces, and predict's tiles among them.

    If merged, the last program of a group computes its observation. Of these programs and those of predict for BLOCK_G
    groups, the last one updates the beliefs; both have the same blocks of channels then.
    """
    blocks = tl.cdiv(channels, BLOCK_C)
    ride, at = share_out(tl.program_id(0), predict_tiles, blocks * pieces)
    block, tile_g, arrives = 0, 0, False
    if PREDICTS:
        if ride >= 0:
            wide, high = tl.cdiv(channels, BLOCK_O), tl.cdiv(groups, BLOCK_G)
            partial_mean = work + 2 * pieces * channels
            block, tile_g, arrives = ride % wide, ride // wide % high, True
            predict(
                ride // (wide * high), tile_g, block, prior_mean, prior_var, transition,
                partial_mean, partial_mean + stretches * groups * channels, groups, inputs, channels,
                BLOCK_G, BLOCK_O, BLOCK_I, SPLIT, PRECISION,
            )  # fmt: skip
    if at >= 0:
        block, piece = at % blocks, at // blocks
        c, c_mask, p, offsets = tile(block, channels, stride_c, stride_p, BLOCK_P, BLOCK_C)
        mean, m2 = image_moments(
            x + piece.to(tl.int64) * channels * positions, c * stride_c, offsets, p, c_mask, positions, stride_p,
            BLOCK_P, BLOCK_C,
        )  # fmt: skip
        tl.store(work + piece * channels + c, mean, mask=c_mask)
        tl.store(work + (pieces + piece) * channels + c, m2 / positions, mask=c_mask)
        if MERGED:
            g = piece // group
            tile_g = g // BLOCK_G
            arrives = last_of(arrived + g * blocks + block, group)
            if arrives:
                observe_group(
                    g, c, c_mask, work, beliefs, image_mean, image_var, image_spread,
                    channels, pieces, groups, group, own, EXPECT, BLOCK_R, BLOCK_C,
                )  # fmt: skip
    if MERGED:
        if arrives:
            g = tile_g * BLOCK_G + tl.arange(0, BLOCK_G)
            programs = tl.minimum(groups - tile_g * BLOCK_G, BLOCK_G) + stretches
            if last_of(arrived + (groups + tile_g) * blocks + block, programs):
                c = block * BLOCK_C + tl.arange(0, BLOCK_C)
                c_mask = c < channels
                observed = beliefs + (2 * groups + g)[:, None] * channels + c[None, :]
                mask = (g < groups)[:, None] & c_mask[None, :]
                update_groups(
                    tl.load(observed, mask=mask, other=0.0),
                    tl.load(observed + groups * channels, mask=mask, other=0.0),
                    g, block, c, c_mask, work, prior_mean, prior_var, beliefs, raw_noise, raw_gain,
                    channels, pieces, groups, stretches, noise_stride, blocks, HAS_PRIOR, PREDICTS, BLOCK_C,
                )  # fmt: skip


@triton.jit(do_not_specialize=["pieces", "groups", "group", "stretches"])
def believe(
    work, prior_mean, prior_var, beliefs, raw_noise, raw_gain, image_mean, image_var, image_spread,
    channels, pieces, groups, group, stretches, noise_stride, own,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, EXPECT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the belief of a group from its pieces and the prediction. Grid: channel blocks x groups."""
    blocks = tl.cdiv(channels, BLOCK_C)
    block, g = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = c < channels
    mean, var = observe_group(
        g, c, c_mask, work, beliefs, image_mean, image_var, image_spread,
        channels, pieces, groups, group, own, EXPECT, BLOCK_R, BLOCK_C,
    )  # fmt: skip
    update_groups(
        mean[None, :], var[None, :], g + tl.arange(0, 1), block, c, c_mask, work, prior_mean, prior_var, beliefs,
        raw_noise, raw_gain, channels, pieces, groups, stretches, noise_stride, blocks, HAS_PRIOR, PREDICTS, BLOCK_C,
    )  # fmt: skip


@triton.jit
def move(running, value, c, c_mask, momentum, keep):
    """running <- running + momentum (value - running); unchanged if `keep`, and where the result is not finite."""
    old = tl.load(running + c, mask=c_mask, other=0.0).to(tl.float32)
    new = old + momentum * (value - old)
    new = tl.where(keep, old, tl.where(new - new == 0, new, old))
    tl.store(running + c, new.to(running.dtype.element_ty), mask=c_mask)


@triton.jit
def remember(
    block, belief_mean, belief_var, observed_var, raw_gain, one_mean, one_var, finite,
    running_mean, running_var, image_mean, image_var, image_spread, steps, skipped,
    pieces, groups, channels, flags, bessel, momentum,
    HAS_PRIOR: tl.constexpr, PIECES: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """RunningNorm.remember for a block of channels, after checking all finite flags of the layer."""
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = c < channels
    f = tl.arange(0, BLOCK_F)
    good = tl.full((BLOCK_F,), 1.0, tl.float32)
    for start in range(0, flags, BLOCK_F):
        good = tl.minimum(good, tl.load(finite + start + f, mask=start + f < flags, other=1.0))
    keep = tl.min(good, axis=0) == 0
    trust = 1.0
    if HAS_PRIOR:
        trust = tl.sigmoid(tl.load(raw_gain).to(tl.float32))
    mean = column_sum(belief_mean, groups, c, c_mask, channels, BLOCK_R, BLOCK_C) / groups
    move(running_mean, mean, c, c_mask, momentum, keep)
    var = column_sum(belief_var, groups, c, c_mask, channels, BLOCK_R, BLOCK_C)
    var += trust * bessel * column_sum(observed_var, groups, c, c_mask, channels, BLOCK_R, BLOCK_C)
    move(running_var, var / groups, c, c_mask, momentum, keep)
    mean = column_sum(one_mean, pieces, c, c_mask, channels, BLOCK_R, BLOCK_C) / pieces
    var = column_sum(one_var, pieces, c, c_mask, channels, BLOCK_R, BLOCK_C)
    spread = tl.zeros((BLOCK_C,), tl.float32)
    r = tl.arange(0, BLOCK_R)
    for start in range(0, pieces, BLOCK_R):
        mask = (start + r < pieces)[:, None] & c_mask[None, :]
        at = (start + r)[:, None] * channels + c[None, :]
        off = tl.where(mask, tl.load(one_mean + at, mask=mask, other=0.0) - mean[None, :], 0.0)
        squares = tl.sum(off * off, axis=0)
        if PIECES > 1:  # merge the pieces of an image into its mean and variance
            of_image = tl.sum(tl.reshape(off, (BLOCK_R // PIECES, PIECES, BLOCK_C)), axis=1) / PIECES
            between = tl.sum(of_image * of_image, axis=0) * PIECES
            var += squares - between
            squares = between
        spread += squares
    drift = mean - tl.load(image_mean + c, mask=c_mask, other=0.0)
    move(image_mean, mean, c, c_mask, momentum, keep)
    move(image_var, var / pieces, c, c_mask, momentum, keep)
    move(image_spread, spread / pieces + (1 - momentum / 2) * drift * drift, c, c_mask, momentum, keep)
    if block == 0:
        kept = keep.to(tl.int64)
        tl.store(steps, tl.load(steps) + 1 - kept)
        tl.store(skipped, tl.load(skipped) + kept)


@triton.jit(do_not_specialize=["positions", "pieces", "groups", "group", "stretches", "remember_blocks"])
def normalize_pieces(
    x, y, residual, weight, bias, work, beliefs, raw_gain,
    running_mean, running_var, image_mean, image_var, image_spread, steps, skipped,
    channels, positions, stride_c, stride_p, pieces, groups, group, stretches, remember_blocks,
    eps, floor, bessel, momentum,
    HAS_PRIOR: tl.constexpr, HAS_RESIDUAL: tl.constexpr, REMEMBER: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: channel blocks x pieces, the last (still in the cache) first, and remember's blocks among them."""
    blocks = tl.cdiv(channels, BLOCK_C)
    ride, at = share_out(tl.program_id(0), remember_blocks, blocks * pieces)
    size = groups * channels
    if REMEMBER:
        if ride >= 0:
            finite = work + 2 * (pieces * channels + stretches * size)
            remember(
                ride, beliefs, beliefs + size, beliefs + 3 * size, raw_gain, work, work + pieces * channels, finite,
                running_mean, running_var, image_mean, image_var, image_spread, steps, skipped,
                pieces, groups, channels, groups * blocks, bessel, momentum, HAS_PRIOR, PIECES, BLOCK_F, ROWS, COLUMNS,
            )  # fmt: skip
    if at >= 0:
        c, c_mask, p, offsets = tile(at % blocks, channels, stride_c, stride_p, BLOCK_P, BLOCK_C)
        piece = pieces - 1 - at // blocks
        row = (piece // group) * channels
        mean = tl.load(beliefs + row + c, mask=c_mask, other=0.0)
        var = tl.load(beliefs + size + row + c, mask=c_mask, other=1.0)
        scale = tl.load(weight + c, mask=c_mask, other=0.0).to(tl.float32) * tl.rsqrt(var + eps)
        shift = tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
        base = piece.to(tl.int64) * channels * positions
        normalize_image(
            x + base, y + base, residual + base, offsets, p, c_mask, mean, scale, shift, floor, positions, stride_p,
            HAS_RESIDUAL, BLOCK_P,
        )  # fmt: skip


@triton.jit
def masked_gradient(dy, y, dy_at, at, mask, value, mean, scale, shift, floor, HAS_RESIDUAL: tl.constexpr):
    """The gradient before the ReLU: zero where the output was at the lower bound.

    Without a residual, the output is recomputed from x, which is read anyway.
    """
    g = tl.load(dy + dy_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        out = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    else:
        out = (value - mean[None, :]) * scale[None, :] + shift[None, :]
    return tl.where(out <= floor, 0.0, g)


@triton.jit
def image_sums(
    dy, x, y, dresidual, dy_offsets, offsets, p, c_mask, mean, scale, shift, floor, positions, dy_stride_p, stride_p,
    HAS_RESIDUAL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum of g and of g (x - m) over one image. Writes g as the gradient of the residual, if there is one."""
    s0 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    s1 = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, positions, BLOCK_P):
        mask = (start + p < positions)[:, None] & c_mask[None, :]
        at = offsets + start * stride_p
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        g = masked_gradient(
            dy, y, dy_offsets + start * dy_stride_p, at, mask, value, mean, scale, shift, floor, HAS_RESIDUAL
        )
        if HAS_RESIDUAL:
            tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=mask)
        s0 += g
        s1 += g * (value - mean[None, :])
    return tl.sum(s0, axis=0), tl.sum(s1, axis=0)


@triton.jit
def belief_gradient(
    s0, s1, weight_c, mean, var, eps, count,
    observed_mean, observed_var, raw_gain, upper_dmean, upper_dvar,
    dpredicted_mean, dpredicted_var, dgain, dnoise, dweight, dbias,
    row, c, c_mask,
    HAS_PRIOR: tl.constexpr, HAS_UPPER: tl.constexpr,
):  # fmt: skip
    """Backward of normalize and update for the channels of one group. Writes their sums for q, and for a shared R.

    Returns the factors of dx = a g + b (x - xbar) + k, and xbar.
    """
    rstd = tl.rsqrt(var + eps)
    a = weight_c * rstd
    tl.store(dbias + row + c, s0, mask=c_mask)
    tl.store(dweight + row + c, s1 * rstd, mask=c_mask)
    dmean = -a * s0
    dvar = -0.5 * a * rstd * rstd * s1
    if HAS_UPPER:
        dmean += tl.load(upper_dmean + row + c, mask=c_mask, other=0.0)
        dvar += tl.load(upper_dvar + row + c, mask=c_mask, other=0.0)
    xbar = tl.load(observed_mean + row + c, mask=c_mask, other=0.0)
    dxbar = dmean
    ds = dvar
    if HAS_PRIOR:
        q = tl.sigmoid(tl.load(raw_gain).to(tl.float32))
        s = tl.load(observed_var + row + c, mask=c_mask, other=0.0)
        # With e = xbar - m = p (xbar - m'), no derivative contains the prediction, so it is not stored.
        e = xbar - mean
        across = 2 * q * e * dvar
        p = tl.where(q > 0, 1 - q, 0.0)  # at q = 0 no gradient passes through the prediction: BatchKalmanNorm.held
        tl.store(dpredicted_mean + row + c, p * dmean - across, mask=c_mask)
        tl.store(dpredicted_var + row + c, p * dvar, mask=c_mask)
        tl.store(dnoise, tl.sum(tl.where(c_mask, p * dvar, 0.0), axis=0))
        draw = q * (dmean * e + dvar * (s - var + e * e))
        tl.store(dgain, tl.sum(tl.where(c_mask, draw, 0.0), axis=0))
        dxbar = q * dmean + across
        ds = q * dvar
    return a, 2 * ds / count, dxbar / count, xbar


@triton.jit
def write_gradient(
    dy, x, y, dresidual, dx, dy_offsets, offsets, p, c_mask, mean, scale, shift, floor, a, b, k, xbar,
    positions, dy_stride_p, stride_p,
    HAS_RESIDUAL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    for start in range(0, positions, BLOCK_P):
        mask = (start + p < positions)[:, None] & c_mask[None, :]
        at = offsets + start * stride_p
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            g = tl.load(dresidual + at, mask=mask, other=0.0).to(tl.float32)
        else:
            g = masked_gradient(
                dy, y, dy_offsets + start * dy_stride_p, at, mask, value, mean, scale, shift, floor, HAS_RESIDUAL
            )
        out = g * a[None, :] + (value - xbar[None, :]) * b[None, :] + k[None, :]
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def undo_group(
    g, block, c, c_mask, work, weight, beliefs, raw_gain, upper_dmean, upper_dvar, dpriors,
    channels, positions, pieces, groups, group, eps, blocks,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, HAS_UPPER: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Backward of `observe_group` and `update_groups`, from the pieces' sums."""
    first = work + g * group * channels
    s0 = column_sum(first, group, c, c_mask, channels, BLOCK_R, BLOCK_C)
    s1 = column_sum(first + pieces * channels, group, c, c_mask, channels, BLOCK_R, BLOCK_C)
    row, size = g * channels, groups * channels
    mean = tl.load(beliefs + row + c, mask=c_mask, other=0.0)
    var = tl.load(beliefs + size + row + c, mask=c_mask, other=1.0)
    weight_c = tl.load(weight + c, mask=c_mask, other=0.0).to(tl.float32)
    rows = work + 2 * pieces * channels
    parts = rows + 6 * size + g * blocks + block
    dpredicted = rows if PREDICTS else dpriors
    _, b, k, _ = belief_gradient(
        s0, s1, weight_c, mean, var, eps, group * positions,
        beliefs + 2 * size, beliefs + 3 * size, raw_gain, upper_dmean, upper_dvar,
        dpredicted, dpredicted + size, parts, parts + groups * blocks, rows + 2 * size, rows + 3 * size,
        row, c, c_mask, HAS_PRIOR, HAS_UPPER,
    )  # fmt: skip
    tl.store(rows + 4 * size + row + c, b, mask=c_mask)
    tl.store(rows + 5 * size + row + c, k, mask=c_mask)


@triton.jit(do_not_specialize=["positions", "pieces", "groups", "group"])
def sums(
    dy, x, y, dresidual, weight, bias, beliefs, work, arrived, raw_gain, upper_dmean, upper_dvar, dpriors,
    channels, positions, stride_c, stride_p, dy_size, dy_stride_p, pieces, groups, group, eps, floor,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    MERGED: tl.constexpr, PIECES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid: channel blocks x pieces. If merged, the last program of a group runs the backward of its belief."""
    blocks = tl.cdiv(channels, BLOCK_C)
    block, piece = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    c, c_mask, p, offsets = tile(block, channels, stride_c, stride_p, BLOCK_H, BLOCK_C)
    dy_offsets = p[:, None] * dy_stride_p + c[None, :] * stride_c
    g = piece // group
    row = g * channels
    mean = tl.load(beliefs + row + c, mask=c_mask, other=0.0)
    var = tl.load(beliefs + groups * channels + row + c, mask=c_mask, other=1.0)
    scale = tl.load(weight + c, mask=c_mask, other=0.0).to(tl.float32) * tl.rsqrt(var + eps)
    shift = tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
    base = piece.to(tl.int64) * channels * positions
    s0, s1 = image_sums(
        dy + place_of(piece, positions, dy_size, dy_stride_p, PIECES), x + base, y + base, dresidual + base,
        dy_offsets, offsets, p, c_mask, mean, scale, shift, floor, positions, dy_stride_p, stride_p,
        HAS_RESIDUAL, BLOCK_H, BLOCK_C,
    )  # fmt: skip
    tl.store(work + piece * channels + c, s0, mask=c_mask)
    tl.store(work + (pieces + piece) * channels + c, s1, mask=c_mask)
    if MERGED:
        if last_of(arrived + g * blocks + block, group):
            undo_group(
                g, block, c, c_mask, work, weight, beliefs, raw_gain, upper_dmean, upper_dvar, dpriors,
                channels, positions, pieces, groups, group, eps, blocks,
                HAS_PRIOR, PREDICTS, HAS_UPPER, BLOCK_R, BLOCK_C,
            )  # fmt: skip


@triton.jit
def place_of(piece, positions, dy_size, dy_stride_p, PIECES: tl.constexpr):
    """The offset of the gradient of a piece, in images that are `dy_size` apart."""
    return (piece // PIECES).to(tl.int64) * dy_size + (piece % PIECES) * positions * dy_stride_p


@triton.jit(do_not_specialize=["positions", "pieces", "groups", "group"])
def disbelieve(
    work, weight, beliefs, raw_gain, upper_dmean, upper_dvar, dpriors,
    channels, positions, pieces, groups, group, eps,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, HAS_UPPER: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Backward of `believe`. Grid: channel blocks x groups."""
    blocks = tl.cdiv(channels, BLOCK_C)
    block, g = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    undo_group(
        g, block, c, c < channels, work, weight, beliefs, raw_gain, upper_dmean, upper_dvar, dpriors,
        channels, positions, pieces, groups, group, eps, blocks, HAS_PRIOR, PREDICTS, HAS_UPPER, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@triton.jit
def prior_gradient(
    tile_g, tile_i, dpredicted_mean, dpredicted_var, transition, dprior_mean, dprior_var,
    groups, inputs, channels,
    BLOCK_G: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dm = A^T dm' and dv = (A*A)^T dv'."""
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    g = tile_g * BLOCK_G + tl.arange(0, BLOCK_G)
    o = tl.arange(0, BLOCK_O)
    mean = tl.zeros((BLOCK_G, BLOCK_I), tl.float32)
    var = tl.zeros((BLOCK_G, BLOCK_I), tl.float32)
    for start in range(0, channels, BLOCK_O):
        o_mask = start + o < channels
        at = g[:, None] * channels + (start + o)[None, :]
        mask = (g < groups)[:, None] & o_mask[None, :]
        dm = tl.load(dpredicted_mean + at, mask=mask, other=0.0)
        dv = tl.load(dpredicted_var + at, mask=mask, other=0.0)
        a = tl.load(
            transition + (start + o)[:, None] * inputs + i[None, :],
            mask=o_mask[:, None] & (i < inputs)[None, :],
            other=0.0,
        ).to(tl.float32)
        mean = tl.dot(dm, a, mean, input_precision=PRECISION)
        var = tl.dot(dv, a * a, var, input_precision=PRECISION)
    at = g[:, None] * inputs + i[None, :]
    mask = (g < groups)[:, None] & (i < inputs)[None, :]
    tl.store(dprior_mean + at, mean, mask=mask)
    tl.store(dprior_var + at, var, mask=mask)


@triton.jit
def transition_gradient(
    tile_o, tile_i, dpredicted_mean, dpredicted_var, prior_mean, prior_var, transition, dtransition,
    groups, inputs, channels,
    BLOCK_G: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA = dm'^T m + 2 A * (dv'^T v), summed over the groups."""
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    g = tl.arange(0, BLOCK_G)
    mean = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    var = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for start in range(0, groups, BLOCK_G):
        g_mask = start + g < groups
        out_at = (start + g)[None, :] * channels + o[:, None]
        out_mask = g_mask[None, :] & (o < channels)[:, None]
        in_at = (start + g)[:, None] * inputs + i[None, :]
        in_mask = g_mask[:, None] & (i < inputs)[None, :]
        dm = tl.load(dpredicted_mean + out_at, mask=out_mask, other=0.0)
        dv = tl.load(dpredicted_var + out_at, mask=out_mask, other=0.0)
        m = tl.load(prior_mean + in_at, mask=in_mask, other=0.0)
        v = tl.load(prior_var + in_at, mask=in_mask, other=0.0)
        mean = tl.dot(dm, m, mean, input_precision=PRECISION)
        var = tl.dot(dv, v, var, input_precision=PRECISION)
    at = o[:, None] * inputs + i[None, :]
    mask = (o < channels)[:, None] & (i < inputs)[None, :]
    a = tl.load(transition + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dtransition + at, mean + 2 * a * var, mask=mask)


@triton.jit
def total_of(values, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(values + start + at, mask=start + at < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def finish_backward(
    pid, dpredicted_mean, dpredicted_var, dgain_parts, dnoise_parts, dweight_rows, dbias_rows,
    prior_mean, prior_var, transition, raw_noise,
    dprior_mean, dprior_var, dtransition, dnoise, dgain, dweight, dbias,
    groups, inputs, channels, noise_stride, parts, prior_tiles, transition_tiles,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backward of predict, and the sums of parameters over the groups.

    The programs process the tiles of the prior's gradient, then those of A's gradient, then the channel blocks.
    """
    if PREDICTS:
        if pid < prior_tiles:
            wide = tl.cdiv(inputs, BLOCK_A)
            prior_gradient(
                pid // wide, pid % wide, dpredicted_mean, dpredicted_var, transition, dprior_mean, dprior_var,
                groups, inputs, channels, BLOCK_G, BLOCK_K, BLOCK_A, PRECISION,
            )  # fmt: skip
        elif pid < prior_tiles + transition_tiles:
            wide = tl.cdiv(inputs, BLOCK_A)
            at = pid - prior_tiles
            transition_gradient(
                at // wide, at % wide, dpredicted_mean, dpredicted_var, prior_mean, prior_var, transition,
                dtransition, groups, inputs, channels, BLOCK_G, BLOCK_A, BLOCK_A, PRECISION,
            )  # fmt: skip
    block = pid - prior_tiles - transition_tiles
    if block >= 0:
        c = block * BLOCK_C + tl.arange(0, BLOCK_C)
        c_mask = c < channels
        tl.store(dweight + c, column_sum(dweight_rows, groups, c, c_mask, channels, BLOCK_R, BLOCK_C), mask=c_mask)
        tl.store(dbias + c, column_sum(dbias_rows, groups, c, c_mask, channels, BLOCK_R, BLOCK_C), mask=c_mask)
        if HAS_PRIOR:
            if PREDICTS:
                if noise_stride > 0:  # one R per channel
                    total = column_sum(dpredicted_var, groups, c, c_mask, channels, BLOCK_R, BLOCK_C)
                    raw = tl.load(raw_noise + c, mask=c_mask, other=0.0).to(tl.float32)
                    tl.store(dnoise + c, total * tl.sigmoid(raw), mask=c_mask)
            if block == 0:
                tl.store(dgain, total_of(dgain_parts, parts, BLOCK_R * BLOCK_C))
                if PREDICTS:
                    if noise_stride == 0:
                        raw = tl.load(raw_noise).to(tl.float32)
                        tl.store(dnoise, total_of(dnoise_parts, parts, BLOCK_R * BLOCK_C) * tl.sigmoid(raw))


@triton.jit(
    do_not_specialize=[
        "positions", "pieces", "group", "groups", "prior_tiles", "transition_tiles", "finish_tiles",
    ]
)  # fmt: skip
def gradient(
    dy, x, y, dresidual, dx, weight, bias, beliefs, work,
    prior_mean, prior_var, transition, raw_noise, dpriors, dparameters,
    channels, positions, stride_c, stride_p, dy_size, dy_stride_p, pieces, groups, group, inputs, noise_stride,
    prior_tiles, transition_tiles, finish_tiles, eps, floor,
    HAS_PRIOR: tl.constexpr, PREDICTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: channel blocks x pieces, the last (still in the cache) first, and finish_backward's tiles among them."""
    blocks = tl.cdiv(channels, BLOCK_C)
    ride, at = share_out(tl.program_id(0), finish_tiles, blocks * pieces)
    size = groups * channels
    rows = work + 2 * pieces * channels
    if ride >= 0:
        parts = rows + 6 * size
        dweight = dparameters + channels * inputs  # after that of A
        dnoise = dweight + 2 * channels
        dgain = dnoise + 1 + (channels - 1) * noise_stride if PREDICTS else dnoise
        finish_backward(
            ride, rows, rows + size, parts, parts + groups * blocks, rows + 2 * size, rows + 3 * size,
            prior_mean, prior_var, transition, raw_noise,
            dpriors, dpriors + groups * inputs, dparameters, dnoise, dgain, dweight, dweight + channels,
            groups, inputs, channels, noise_stride, groups * blocks, prior_tiles, transition_tiles,
            HAS_PRIOR, PREDICTS, BLOCK_G, BLOCK_I, BLOCK_O, ROWS // 4, COLUMNS, PRECISION,
        )  # fmt: skip
    if at >= 0:
        c, c_mask, p, offsets = tile(at % blocks, channels, stride_c, stride_p, BLOCK_P, BLOCK_C)
        dy_offsets = p[:, None] * dy_stride_p + c[None, :] * stride_c
        piece = pieces - 1 - at // blocks
        row = (piece // group) * channels
        mean = tl.load(beliefs + row + c, mask=c_mask, other=0.0)
        var = tl.load(beliefs + size + row + c, mask=c_mask, other=1.0)
        scale = tl.load(weight + c, mask=c_mask, other=0.0).to(tl.float32) * tl.rsqrt(var + eps)
        shift = tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
        xbar = tl.load(beliefs + 2 * size + row + c, mask=c_mask, other=0.0)
        b = tl.load(rows + 4 * size + row + c, mask=c_mask, other=0.0)
        k = tl.load(rows + 5 * size + row + c, mask=c_mask, other=0.0)
        base = piece.to(tl.int64) * channels * positions
        write_gradient(
            dy + place_of(piece, positions, dy_size, dy_stride_p, PIECES), x + base, y + base, dresidual + base,
            dx + base, dy_offsets, offsets, p, c_mask, mean, scale, shift, floor, scale, b, k, xbar,
            positions, dy_stride_p, stride_p, HAS_RESIDUAL, BLOCK_P,
        )  # fmt: skip
