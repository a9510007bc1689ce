# Mask R-CNN + NaLaFormer-T on COCO, 12 epochs (8 GPUs, 2 images each).
_base_ = './coco/mask-rcnn_nala-t_fpn_1x_coco.py'
