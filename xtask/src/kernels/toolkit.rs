//! Where nvcc and the disassembler are: on the machine, or in two environments under `target/cuda` that pip fills.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail};

use super::nvcc;

/// nvcc and all that it needs to make an image. Pinned, for nvcc's package names no versions of the others.
const NVCC_PACKAGES: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];
/// In an environment of their own: the packages overwrite files of the others.
const DISASSEMBLER_PACKAGES: &[&str] = &["nvidia-cuda-nvdisasm==13.2.86", "nvidia-cuda-cuobjdump==13.2.86"];

/// The programs.
pub(super) struct Toolkit {
    pub(super) nvcc: PathBuf,
    /// Folder of cuobjdump, and of nvdisasm, which it calls.
    disassembler: PathBuf,
}

impl Toolkit {
    /// What the machine has.
    pub(super) fn find() -> Result<Self> {
        let Some(nvcc) = nvcc::find() else {
            bail!(
                "nvcc was not found: set NVCC or CUDA_HOME, put it on PATH, or let `cargo xtask kernels --fetch` install it \
                 from Python packages"
            );
        };
        let beside = nvcc.parent().map(Path::to_path_buf);
        let path = env::var_os("PATH").unwrap_or_default();
        let disassembler =
            beside.into_iter().chain(env::split_paths(&path)).find(|path| path.join("cuobjdump").is_file());
        let disassembler =
            disassembler.context("cuobjdump was found neither beside nvcc nor on PATH; --fetch installs it")?;
        Ok(Toolkit { nvcc, disassembler })
    }

    /// What pip installs, once.
    pub(super) fn fetch() -> Result<Self> {
        let folder = crate::root().join("target/cuda");
        let nvcc = install(&folder.join("nvcc"), NVCC_PACKAGES, "nvcc")?.join("nvcc");
        let disassembler = install(&folder.join("disassembler"), DISASSEMBLER_PACKAGES, "cuobjdump")?;
        Ok(Toolkit { nvcc, disassembler })
    }

    /// The machine code of an image, as text.
    pub(super) fn disassembly(&self, image: &Path) -> Result<String> {
        self.cuobjdump("-sass", image)
    }

    /// Registers and memory of each kernel, as text.
    pub(super) fn resource_usage(&self, image: &Path) -> Result<String> {
        self.cuobjdump("-res-usage", image)
    }

    fn cuobjdump(&self, what: &str, image: &Path) -> Result<String> {
        let mut path = vec![self.disassembler.clone()];
        path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
        let program = self.disassembler.join("cuobjdump");
        let output = Command::new(&program).arg(what).arg(image).env("PATH", env::join_paths(path)?).output();
        let output = output.with_context(|| format!("{} could not be run", program.display()))?;
        if !output.status.success() {
            bail!("cuobjdump {what} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// The `bin` folder with `program` in a Python environment with these packages, which is made unless it is whole.
fn install(folder: &Path, packages: &[&str], program: &str) -> Result<PathBuf> {
    let stamp = folder.join("packages");
    let wanted = packages.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
        return bin(folder, program);
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    eprintln!("installing {} into {}", packages.join(" "), folder.display());
    python(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    python(Command::new(folder.join("bin/python")).args(pip).args(packages))?;
    let bin = bin(folder, program)?;
    fs::write(&stamp, wanted)?;
    Ok(bin)
}

fn bin(folder: &Path, program: &str) -> Result<PathBuf> {
    let libraries = folder.join("lib");
    for entry in fs::read_dir(&libraries).with_context(|| format!("{}", libraries.display()))? {
        let bin = entry?.path().join("site-packages/nvidia/cu13/bin");
        if bin.join(program).is_file() {
            return Ok(bin);
        }
    }
    bail!("no {program} under {}; delete {} to install it again", libraries.display(), folder.display())
}

fn python(command: &mut Command) -> Result<()> {
    let status = command.status().context("python3 with venv and pip is needed and could not be run")?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}
