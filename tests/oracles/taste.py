"""Slow twins of the taste model's fast paths: from the definition, one covariance of all ratings."""

import numpy as np


def covariance(x: np.ndarray, prior: np.ndarray, noise: float, weight: np.ndarray) -> np.ndarray:
    """[n, n]: of the stars of n ratings with columns x [n, d], before anything is known of them."""
    return x @ np.diag(prior) @ x.T + np.diag(noise / weight)


def log_evidence(x: np.ndarray, y: np.ndarray, prior: np.ndarray, noise: float, weight: np.ndarray) -> float:
    """log N(y; 0, covariance). A rating of weight w counts as w ratings with the same stars, so its share of
    the normaliser is that of w ratings too."""
    c = covariance(x, prior, noise, weight)
    copies = (weight - 1) * np.log(2 * np.pi * noise) + np.log(weight)
    normal = len(y) * np.log(2 * np.pi) + np.linalg.slogdet(c)[1] + y @ np.linalg.solve(c, y)
    return float(-0.5 * (normal + copies.sum()))


def predict(
    x: np.ndarray, y: np.ndarray, prior: np.ndarray, noise: float, weight: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance [R] of the stars of replies with columns new [R, d], by conditioning."""
    c = covariance(x, prior, noise, weight)
    cross = new @ np.diag(prior) @ x.T
    mean = cross @ np.linalg.solve(c, y)
    variance = np.diag(new @ np.diag(prior) @ new.T) - np.diag(cross @ np.linalg.solve(c, cross.T))
    return mean, noise + variance


def gram_counts(grams: list[str], wanted: str) -> int:
    return sum(gram == wanted for gram in grams)
