# UperNet + NaLaFormer-T on Cityscapes, 512x1024 crops, 160k iterations of 8 images (4 GPUs x 2).
_base_ = './cityscapes/upernet_nala-t_4xb2-160k_cityscapes-512x1024.py'
