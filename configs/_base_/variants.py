# Channels of each variant's four stages, for necks and heads. What else tells the variants apart,
# drop path included, is the backbone's default for its `arch`.
channels = dict(
    xt=[32, 64, 128, 384],
    t=[64, 128, 256, 512],
    s=[64, 128, 320, 512],
    b=[96, 192, 384, 512],
    l=[96, 192, 448, 640],
)
