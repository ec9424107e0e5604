"""Writes ``fixtures/*.json``: the losses of TRL and verl on small tensors, with their gradients.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 trl==1.16.0 omegaconf hydra-core tensordict ray orjson
    peers/bin/pip install --no-deps verl==0.9.1
    peers/bin/python tests/methods/make_peer_fixtures.py

The peers' own functions run unchanged; what they need of a trainer around them is a stand-in. Every
row has a live token, masks have no holes, numbers are float32 printed with nine digits. All
gradients are with respect to the log-probabilities of the policy.

``trl_pairs.json``, N pairs of T tokens, member 0 chosen and member 1 rejected:

    inputs.mask, inputs.logprobs, inputs.ref_logprobs    [N, 2, T]
    dpo.<loss type>       options (beta, ...), loss, gradient [N, 2, T]; the mean over pairs
    kto                   options with the divergence ``kl`` that TRL subtracts, loss, gradient; the
                          mean over the 2N completions, chosen ones desirable
    cpo.<loss type>       the preference term of CPO alone (no likelihood term); "simpo" is given
                          the mean log-probability of a completion's tokens, the others the sum
    orpo                  the odds-ratio term alone, of mean log-probabilities; beta its weight
    jsd                   student_logits, teacher_logits [B, T, V], mask [B, T], and cases: beta,
                          loss (the sum over vocabulary, mean over live tokens), gradient with
                          respect to the student's logits

``policy.json``, N groups of G completions of T tokens, rows in the order of groups:

    inputs                mask, the log-probabilities, values, rewards [B], parts [B, 2] and given
                          advantages [B] (one for each completion)
    advantages.<name>     verl's estimators: options, advantages [B, T] (and returns)
    losses.<name>         TRL's and verl's losses of the given advantages: peer, options, loss,
                          gradient [B, T]; "value_loss" is differentiated by the values
    kl.<name>             verl's estimators [B, T] of logprobs against ref_logprobs
    weights.<name>        verl's corrections: the weight of each token [B, T], after its mask
"""

import collections
import json
import pathlib
import types

import numpy as np
import torch

OUT = pathlib.Path(__file__).parent / "fixtures"
Space = types.SimpleNamespace


def plain(x):
    """Arrays and tensors as lists of numbers of nine digits."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return plain(x.tolist())
    return float(f"{x:.9g}") if isinstance(x, float) else x


def differentiate(loss, at):
    """(loss, gradient) of a function of one tensor."""
    at = at.clone().requires_grad_()
    value = loss(at)
    value.backward()
    return {"loss": value.item(), "gradient": at.grad}


def trainer(**fields):
    """Attributes of TRL's trainer that its losses read."""
    same = lambda x, **_: x  # noqa: E731
    accelerator = Space(
        device="cpu",
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        num_processes=1,
        unwrap_model=same,
        sync_gradients=True,
    )
    common = {
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "model": Space(training=True),
        "_metrics": {"train": collections.defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return Space(**common, **fields)


class Model:
    """Answers with the given log-probabilities, whatever it is asked."""

    def __init__(self, logprobs):
        flat = torch.zeros_like(logprobs)
        self.training = True
        self.outputs = Space(
            log_probs=logprobs, entropy=flat, mean_logits=flat, is_top1=flat.bool(), aux_loss=None
        )

    def __call__(self, **_):
        return self.outputs


# ---------------------------------------------------------------- pairs


def pairs():
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    torch.manual_seed(0)
    n, t = 3, 4
    lengths = torch.tensor([[4, 2], [1, 3], [3, 4]])
    mask = (torch.arange(t) < lengths[..., None]).float()
    ref = (-1.5 + 0.5 * torch.randn(n, 2, t)) * mask
    policy = ref + 0.5 * torch.randn(n, 2, t) * mask
    rows = lambda x: x.transpose(0, 1).reshape(2 * n, t)  # noqa: E731  TRL: chosen, then rejected
    attention = torch.cat([torch.zeros(2 * n, 1), rows(mask)], 1)
    inputs = {
        "input_ids": torch.zeros(2 * n, t + 1, dtype=torch.long),
        "completion_mask": attention,
    }
    inputs["attention_mask"] = torch.ones_like(attention)
    ref_rows = rows(ref).sum(1)

    def dpo(loss_type, **options):
        settings = {"beta": 0.1, "label_smoothing": 0.0, "tau": 0.05, **options}
        fake = trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=settings["beta"],
            label_smoothing=settings["label_smoothing"],
            use_weighting=False,
            args=Space(discopop_tau=settings["tau"]),
        )
        batch = {**inputs, "ref_chosen_logps": ref_rows[:n], "ref_rejected_logps": ref_rows[n:]}

        def loss(x):
            return DPOTrainer._compute_loss(fake, Model(rows(x * mask)), batch, False)

        return {"options": settings, **differentiate(loss, policy)}

    kinds = ["sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired"]
    kinds += ["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]
    losses = {kind: dpo(kind) for kind in kinds}
    for kind in ("exo_pair", "robust"):
        losses[kind] = dpo(kind, label_smoothing=0.1)
    losses["aot_smoothed"] = dpo("aot", label_smoothing=0.1)

    def kto():
        drift = torch.tensor([0.3, 0.1, -0.2, 0.4, 0.0, 0.2])
        options = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}
        fake = trainer(
            calculate_KL=True,
            precompute_ref_logps=True,
            loss_type="kto",
            _compute_kl_logps=lambda model, batch: drift,
            **options,
        )
        batch = {**inputs, "label": torch.tensor([True] * n + [False] * n), "ref_logps": ref_rows}
        batch["ref_KL_logps"] = torch.zeros_like(drift)

        def loss(x):
            return KTOTrainer._compute_loss(fake, Model(rows(x * mask)), batch, False)

        return {"options": {**options, "kl": drift.mean().item()}, **differentiate(loss, policy)}

    def cpo(loss_type, **options):
        settings = {"beta": 0.1, "label_smoothing": 0.0, "alpha": 0.0, **options}
        fake = trainer(loss_type=loss_type, **settings)

        def loss(x):
            scores = (x * mask).sum(2)
            if loss_type == "simpo":
                scores = scores / mask.sum(2)
            return CPOTrainer.cpo_loss(fake, scores[:, 0], scores[:, 1])[0].mean()

        return {"options": settings, **differentiate(loss, policy)}

    def orpo():
        fake = trainer(beta=0.1)

        def loss(x):
            scores = (x * mask).sum(2) / mask.sum(2)
            return -ORPOTrainer.odds_ratio_loss(fake, scores[:, 0], scores[:, 1])[0].mean()

        return {"options": {"beta": 0.1}, **differentiate(loss, policy)}

    cpos = {kind: cpo(kind) for kind in ("sigmoid", "hinge", "ipo")}
    cpos["simpo"] = cpo("simpo", beta=2.0, simpo_gamma=0.5)
    return {
        "inputs": {"mask": mask, "logprobs": policy, "ref_logprobs": ref},
        "dpo": losses,
        "kto": kto(),
        "cpo": cpos,
        "orpo": orpo(),
        "jsd": jsd(),
    }


def jsd():
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    torch.manual_seed(1)
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    labels = torch.where(mask > 0, 0, -100)
    cases = []
    for beta in (0.0, 0.1, 0.5, 1.0):

        def loss(x, beta=beta):
            return GKDTrainer.generalized_jsd_loss(
                x, teacher, labels, beta=beta, num_items_in_batch=mask.sum()
            )

        cases.append({"beta": beta, **differentiate(loss, student)})
    return {"student_logits": student, "teacher_logits": teacher, "mask": mask, "cases": cases}


# ---------------------------------------------------------------- policy losses

N, G, T = 2, 3, 5


def numbers():
    torch.manual_seed(2)
    b = N * G
    lengths = torch.tensor([5, 3, 1, 4, 2, 5])
    mask = (torch.arange(T) < lengths[:, None]).float()
    sampler = (-1.5 + 0.4 * torch.randn(b, T)).clamp(max=-0.05) * mask
    near = lambda scale: (sampler + scale * torch.randn(b, T)).clamp(max=-0.02) * mask  # noqa: E731
    return {
        "mask": mask,
        "sampler_logprobs": sampler,
        "logprobs": near(0.4),
        "proximal_logprobs": near(0.4),
        "ref_logprobs": near(0.6),
        "values": torch.randn(b, T) * mask,
        "rollout_values": torch.randn(b, T) * mask,
        "collision": torch.rand(b, T) * mask,
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.25, -1.0, 1.0]),
        "parts": torch.randn(b, 2),
        "advantages": torch.tensor([1.2, -0.7, -0.5, 0.1, -1.1, 1.0]),
    }


def estimators(d):
    """verl's advantages of the rewards, each at its completion's last token."""
    from verl.trainer.ppo import core_algos as verl

    mask = d["mask"]
    last = mask.sum(1).long() - 1
    at_last = lambda x: torch.nn.functional.one_hot(last, T) * x[:, None]  # noqa: E731
    rewards, groups = at_last(d["rewards"]), np.repeat(np.arange(N), G)
    by_name = {
        "grpo": verl.compute_grpo_outcome_advantage,
        "rloo": verl.compute_rloo_outcome_advantage,
        "opo": verl.compute_opo_outcome_advantage,
        "gpg": verl.compute_gpg_outcome_advantage,
        "reinforce_plus_plus_baseline": (
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage
        ),
    }
    estimates = {
        name: {"options": {}, "advantages": estimate(rewards.clone(), mask, groups)[0]}
        for name, estimate in by_name.items()
    }
    plus = verl.compute_reinforce_plus_plus_outcome_advantage(
        rewards.clone(), mask, config=Space(gamma=0.9)
    )
    estimates["reinforce_plus_plus"] = {"options": {"discount": 0.9}, "advantages": plus[0]}
    greedy = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0, 0.0])
    remax = verl.compute_remax_outcome_advantage(rewards.clone(), greedy, mask)
    estimates["remax"] = {"options": {"greedy": greedy}, "advantages": remax[0]}
    gae = verl.compute_gae_advantage_return(rewards, d["rollout_values"], mask, 0.9, 0.8)
    estimates["gae"] = {
        "options": {"discount": 0.9, "decay": 0.8, "whiten": True},
        "advantages": gae[0] * mask,
        "returns": gae[1] * mask,
    }
    otb = verl.compute_optimal_token_baseline_advantage(
        rewards, mask, groups, d["sampler_logprobs"], d["collision"]
    )
    estimates["otb"] = {"options": {"lone_tail": True}, "advantages": otb[0]}
    attention = torch.cat([torch.ones(N * G, 1), mask], 1).long()
    gdpo = verl.compute_gdpo_outcome_advantage(
        rewards,
        mask,
        groups,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": d["parts"][:, 0].numpy(), "b": d["parts"][:, 1].numpy()},
        batch={"prompts": torch.ones(N * G, 1), "attention_mask": attention},
    )
    estimates["gdpo"] = {"options": {"weights": [1.0, 0.5]}, "advantages": gdpo[0]}
    return estimates


def trl_loss(d, kind, **options):
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None, "beta": 0.0}
    settings |= {"importance_sampling_level": "token", "max_completion_length": 7, **options}
    mask = d["mask"]
    args = {"use_bias_correction_kl": False, "steps_per_generation": 1, "delta": settings["delta"]}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0}
    args |= {"vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    inputs = {
        "prompt_ids": torch.zeros(N * G, 1, dtype=torch.long),
        "prompt_mask": torch.ones(N * G, 1),
        "completion_ids": torch.zeros(N * G, T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": d["advantages"],
        "old_per_token_logps": d["sampler_logprobs"],
        "ref_per_token_logps": d["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    fake = trainer(
        args=Space(**args),
        loss_type=kind,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        **{k: settings[k] for k in ("epsilon_low", "epsilon_high", "beta")},
        **{k: settings[k] for k in ("importance_sampling_level", "max_completion_length")},
    )
    compute = GMPOTrainer._compute_loss if kind == "gmpo" else GRPOTrainer._compute_loss

    def loss(x):
        fake._get_per_token_logps_and_entropies = lambda *a, **k: (x, torch.ones_like(x), None)
        return compute(fake, None, inputs)

    settings = {key: value for key, value in settings.items() if value is not None}
    return {"peer": "trl", "options": settings, **differentiate(loss, d["logprobs"])}


def verl_loss(d, kind, mode="token-mean", against="sampler_logprobs", **options):
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    class Config(ActorConfig):
        def __init__(self, **fields):
            self.__dict__.update(fields)

    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **options}
    cov = {"clip_cov_ratio": 0.0, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    cov |= {"kl_cov_ratio": 0.0, "ppo_kl_coef": 1.0}
    policy_loss = Space(**{key: settings.get(key, value) for key, value in cov.items()})
    fields = {"clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, **settings}
    config = Config(policy_loss=policy_loss, global_batch_info={}, **fields)
    wide = d["advantages"][:, None] * d["mask"]

    def loss(x):
        function = core_algos.get_policy_loss_fn(kind)
        return function(d[against], x, wide, d["mask"], mode, config)[0]

    extra = {"mode": mode, "against": against}
    result = differentiate(loss, d["logprobs"] if kind != "kl_cov" else d["logprobs"].clone())
    return {"peer": "verl", "options": {**settings, **extra}, **result}


def policy():
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as correction

    d = numbers()
    losses = {
        "grpo": trl_loss(d, "grpo"),
        "grpo_kl": trl_loss(d, "grpo", beta=0.04),
        "grpo_delta": trl_loss(d, "grpo", delta=1.3),
        "dr_grpo": trl_loss(d, "dr_grpo"),
        "dapo": trl_loss(d, "dapo"),
        "bnpo": trl_loss(d, "bnpo"),
        "gspo": trl_loss(
            d, "grpo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.1
        ),
        "cispo": trl_loss(d, "cispo", epsilon_high=1.3),
        "sapo": trl_loss(d, "sapo"),
        "vespo": trl_loss(d, "vespo"),
        "gmpo": trl_loss(d, "gmpo", epsilon_low=0.3, epsilon_high=0.4),
        "off_policy_mask": trl_loss(d, "grpo", off_policy_mask_threshold=-0.2),
        "verl_ppo_dual": verl_loss(d, "vanilla", clip_ratio_c=1.1),
        "verl_gspo": verl_loss(
            d, "gspo", "seq-mean-token-mean", clip_ratio_low=0.05, clip_ratio_high=0.1
        ),
        "verl_sapo": verl_loss(d, "sapo", "seq-mean-token-mean"),
        "verl_gpg": verl_loss(d, "gpg"),
        "verl_geo_mean": verl_loss(d, "geo_mean", clip_ratio_low=0.3, clip_ratio_high=0.4),
        "verl_cispo": verl_loss(d, "cispo", clip_ratio_low=0.2, clip_ratio_high=0.3),
        "verl_dppo_tv": verl_loss(
            d, "dppo_tv", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=1.5
        ),
        "verl_dppo_kl": verl_loss(
            d, "dppo_kl", clip_ratio_low=0.002, clip_ratio_high=0.03, clip_ratio_c=1.5
        ),
        # As many are chosen as there are between the bounds, so that verl's draw is of all of them.
        "verl_clip_cov": verl_loss(
            d, "clip_cov", clip_cov_ratio=0.9, clip_cov_lb=0.1, clip_cov_ub=0.6
        ),
        "verl_kl_cov": verl_loss(d, "kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=0.7),
    }

    def value_loss(x):
        return verl.compute_value_loss(
            x, d["values"] * 0.5 + 1, d["rollout_values"], d["mask"], 0.3
        )[0]

    losses["value_loss"] = {
        "peer": "verl",
        "options": {"clip": 0.3, "returns": d["values"] * 0.5 + 1},
        **differentiate(value_loss, d["values"]),
    }
    kl = {k: verl.kl_penalty(d["logprobs"], d["ref_logprobs"], k) for k in ("k1", "k2", "k3")}
    gap = (d["proximal_logprobs"] - d["sampler_logprobs"]) * d["mask"]
    weights = {}
    for name, level in (("tis", "token"), ("sequence_tis", "sequence")):
        corrected = correction.compute_rollout_correction_weights(gap, d["mask"], level, 1.2)
        weights[name] = (corrected[0] if isinstance(corrected, tuple) else corrected) * d["mask"]
    return {
        "inputs": d,
        "advantages": estimators(d),
        "losses": losses,
        "kl": kl,
        "weights": weights,
    }


if __name__ == "__main__":
    from importlib.metadata import version

    OUT.mkdir(exist_ok=True)
    peers = {name: version(name) for name in ("torch", "trl", "verl")}
    for name, make in (("trl_pairs", pairs), ("policy", policy)):
        text = json.dumps({"peers": peers, **plain(make())}, indent=None, separators=(",", ":"))
        (OUT / f"{name}.json").write_text(text.replace('},"', '},\n"') + "\n")
