"""DCP against what a user would pick instead, every method with a value that was chosen on validation images.

Fixed before the runs, with the settings (:mod:`~examples.research.rivals.settings`), the methods and their values
(:mod:`~examples.research.rivals.values`). Before most of the values were run, two things were changed to fit the time
that there was: the second round has the best rows of the first alone, new seeds have the best rivals alone.

Each run is measured on validation and on test images. Values are chosen by the validation accuracy alone; test
accuracies are printed for chosen values only. In each seed a setting has other training images (all of them where it
takes all) and other wrong labels; validation and test images stay, and their labels are right. A gain is the
difference to plain training (CE) with the same seed. Values are chosen on the fast settings, in two rounds of seeds
(``CHOICE_ROUNDS``; the digits have three seeds a round). The first round has all rows. The second has CE, DCP's
default, the five rows that are ahead in the setting, and the five that are ahead in the mean over the settings. A
row with two rounds is preferred to one with the first alone. ResNet-10 and EfficientNet-Lite0 get CE, DCP's default,
and the best two rivals of (a).

**(a) One value for all.** Each method has the value with the largest mean over the fast settings of its mean
validation gain. Reported are the mean gain, the worst gain and each gain on test images. The best rival is the one
with the largest of these validation means. The test compares DCP's default with it: the difference of the two in
accuracy on test images, over all pairs of settings and of seeds that no choice has seen (``CHOSEN_ROUNDS``), with the
paired t-test. It counts as shown at p < 0.01.

**(b) Tuned.** Each method has in each setting the value with the largest validation gain there. Plain training is
tuned as well: the best of its learning rates and weight decays, ``values.PLAIN``. In the same new seeds each setting
has tuned plain training and its best two rivals.

**(c) On top.** In each fast setting DCP's default is added to tuned plain training and to the best two rivals by (b)
among those that are one training step (``values.can_have_dcp``); to all of them as a term of the loss. A gain is the
difference to the same rival without DCP, on test images, in the seeds of ``CHOSEN_ROUNDS``. The question is asked of
the settings with few images or wrong labels, p < 0.01 of the paired t-test after Holm's
correction over the cells of the table.

**The default of DCP** was searched for in six of the settings and confirmed in the others: no rule was better than
today's by more than the error, so it stayed. Commit 0faeaf8 has the rules, the runs and the tables.
"""
