// Rotary position embeddings (RoPE) turn pairs of numbers by the D/2 angles of a position. The pairs are (x_i, x_{i +
// D/2}), or (x_2i, x_2i+1) if TRADITIONAL.

// Return number d of a head of a query or key after the turn.   x[from ..]: the D numbers of the head   turn[at ..]:
// the cosines of the angles, then their sines
template <int D, int TRADITIONAL, typename P>
FN float turned(P x, int from, GLOBAL_IN(float) turn, int at, int d) {
    const int pair = TRADITIONAL ? d / 2 : d % (D / 2);
    const bool second = TRADITIONAL ? d % 2 : d >= D / 2;
    const int step = TRADITIONAL ? 1 : D / 2, other = second ? d - step : d + step;
    const float own = (float)x[from + d], across = (float)x[from + other] * turn[at + D / 2 + pair];
    return fma(own, turn[at + pair], second ? across : -across);
}
