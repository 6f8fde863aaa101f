#!/bin/sh
# All runs of the applications that a page shows; those that have a record are not trained again.
set -eu
python -m examples.research.applications.fine_tuning --seeds 10 \
    --only full "full, DCL" "linear probe" "linear probe, DCL" LoRA "LoRA, DCL"
python -m examples.research.applications.fine_tuning --data icons --network efficientnet-lite0 --shots 5 \
    --epochs 8 --batch-size 24 --full-lr 0.03 --seeds 10 --only full "full, DCP"
python -m examples.research.applications.fine_tuning --data kanji-fonts --network efficientnet-lite0 --shots 5 \
    --epochs 16 --batch-size 24 --full-lr 0.03 --seeds 15 --only full "full, DCP"
python -m examples.research.applications.fine_tuning --data kanji-fonts --network efficientnet-lite0 --shots 2 \
    --epochs 40 --batch-size 24 --full-lr 0.03 --seeds 20 --only full "full, DCP"
python -m examples.research.applications.fine_tuning --data kanji-fonts --network efficientnet-lite0 --shots 20 \
    --epochs 4 --batch-size 24 --full-lr 0.03 --seeds 5 --only full "full, DCP"
python -m examples.research.applications.fine_tuning --data noto-scripts --network efficientnet-lite0 --shots 5 \
    --epochs 24 --batch-size 24 --full-lr 0.03 --seeds 10 --only full "full, DCP"
python -m examples.research.applications.fine_tuning --data kanji-fonts --network efficientnet-lite0 --shots 5 \
    --epochs 16 --batch-size 24 --full-lr 0.03 --seeds 13 --only "linear probe" "linear probe, DCP"
python -m examples.research.applications.fine_tuning --data kanji-fonts --network efficientnet-lite0 --shots 2 \
    --epochs 40 --batch-size 24 --full-lr 0.03 --seeds 5 --only "linear probe" "linear probe, DCP"
python -m examples.research.applications.fine_tuning --data kanji-fonts --network efficientnet-lite0 --shots 20 \
    --epochs 4 --batch-size 24 --full-lr 0.03 --seeds 5 --only "linear probe" "linear probe, DCP"
python -m examples.research.applications.fine_tuning --data icons --network efficientnet-lite0 --shots 2 \
    --epochs 20 --batch-size 24 --full-lr 0.03 --seeds 8 --only full "full, DCP"
python -m examples.research.applications.fine_tuning --data icons --network efficientnet-lite0 --shots 5 \
    --epochs 8 --batch-size 24 --full-lr 0.03 --seeds 8 --only "linear probe" "linear probe, DCP"
python -m examples.research.applications.fine_tuning --data noto-scripts --network efficientnet-lite0 --shots 5 \
    --epochs 24 --batch-size 24 --full-lr 0.03 --probe-lr 0.1 --seeds 8 --only "linear probe" "linear probe, DCP"
python -m examples.research.applications.semi_supervised
python -m examples.research.applications.semi_supervised --labels 250
python -m examples.research.applications.semi_supervised --labels 4000 --train-size 8000
python -m examples.research.applications.masked_autoencoder
python -m examples.research.applications.distillation
python -m examples.research.applications.augmentations
python -m examples.research.applications.text
python -m examples.research.applications.dense
