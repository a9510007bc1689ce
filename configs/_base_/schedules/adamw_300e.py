# 300 epochs of 1024 images a step: 5e-4 for every 512 images, 5 epochs of warm-up, cosine to 1e-5.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(
        type='AdamW', lr=5e-4 * 1024 / 512, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05
    ),
    # The release's layer scales are (1, C, 1, 1), so its optimiser decays them as weights.
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
param_scheduler = [
    dict(
        type='LinearLR', start_factor=1e-3, by_epoch=True, begin=0, end=5,
        convert_to_iter_based=True,
    ),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5, end=300),
]  # fmt: skip
train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(enable=False, base_batch_size=1024)
