# UperNet + NaLaFormer-T on ADE20K, 512x512 crops, 160k iterations of 16 images (8 GPUs, 2 each).
_base_ = './ade20k/upernet_nala-t_8xb2-160k_ade20k-512x512.py'
