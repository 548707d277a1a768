"""What others measured on the released data, percent. Ours has other pictures: compare orders, not digits.

PAPER: bars of the CVPR 2024 poster of Peng et al., which match the mean of both directions. OFFICIAL: picture to text
and text to picture in the outputs saved with the official notebooks. MEANS: mean over subsets of both directions of
CLIP ViT-B/32 and models tuned from it, in the study of FSC-CLIP (Oh et al., EMNLP 2024).
"""

PAPER: dict[str, dict[str, float]] = {
    "FLAVA": {"absolute_size": 37.25, "relative_size": 32.6, "absolute_spatial": 14.4, "relative_spatial": 26.1,
              "existence": 54.9, "count": 17.8},
    "BLIP": {"absolute_size": 43.0, "relative_size": 32.85, "absolute_spatial": 11.6, "relative_spatial": 30.1,
             "existence": 52.75, "count": 37.25},
    "CoCa": {"absolute_size": 37.6, "relative_size": 33.45, "absolute_spatial": 11.75, "relative_spatial": 29.55,
             "existence": 50.45, "count": 36.05},
    "CLIP": {"absolute_size": 39.3, "relative_size": 33.9, "absolute_spatial": 12.45, "relative_spatial": 27.3,
             "existence": 54.75, "count": 24.15},
    "CLIP, tuned by the authors": {"absolute_size": 64.8, "relative_size": 42.2, "absolute_spatial": 32.4,
                                   "relative_spatial": 46.75, "existence": 68.25, "count": 56.7},
}  # fmt: skip
OFFICIAL: dict[str, dict[str, tuple[float, float]]] = {
    "CLIP": {"absolute_size": (44.27, 36.27), "relative_size": (34.07, 32.47), "absolute_spatial": (12.64, 12.20),
             "relative_spatial": (27.10, 26.75), "existence": (57.00, 52.00), "count": (25.27, 23.62)},
    "BLIP": {"absolute_size": (43.20, 43.07), "relative_size": (34.33, 33.27), "absolute_spatial": (12.07, 11.58),
             "relative_spatial": (30.65, 29.60), "existence": (55.50, 50.10), "count": (36.87, 37.40)},
}  # fmt: skip
MEANS: dict[str, float] = {
    "CLIP": 31.9, "NegCLIP": 34.6, "FSC-CLIP (COCO)": 34.2, "FSC-CLIP (LAION-COCO)": 33.4, "GNM-CLIP": 33.1,
    "CE-CLIP": 33.0, "CLoVe": 31.7, "TSVLC": 31.6, "DAC-LLM": 30.8, "DAC-SAM": 29.9,
}  # fmt: skip
